"""The thread that turns the engine, and brings what it makes to where callers wait."""

import logging
import threading
from collections.abc import Callable

from v41jax.engine import Engine
from v41jax.tickets import Request, Ticket, Update

log = logging.getLogger(__name__)


class Failed(RuntimeError):
    """The engine has failed and serves nobody any more."""


class Worker:
    """Runs an engine in a thread of its own."""

    def __init__(self, engine: Engine):
        """Starts the thread; `stop` ends it."""
        self.engine, self.failure = engine, None
        self._listeners: dict[Ticket, Callable[[Update | None], None]] = {}
        self._lock, self._news, self._stopping = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def listening(self) -> int:
        """Callers that wait for something."""
        return len(self._listeners)

    def submit(self, request: Request, listener: Callable[[Update | None], None]) -> Ticket:
        """Puts a request into the queue; its updates go to the listener, in the engine's thread, None if that fails.

        Raises:
          ValueError, Busy: see `Engine.submit`.
          Failed: the engine has failed before.
        """
        with self._lock:  # no update may come before its listener is known
            if self.failure is not None:
                raise Failed(f"the engine has failed: {self.failure!r}")
            ticket = self.engine.submit(request)
            self._listeners[ticket] = listener
        self._news.set()
        return ticket

    def cancel(self, ticket: Ticket):
        """Cancels a request; its listener hears no more."""
        with self._lock:
            self._listeners.pop(ticket, None)
        self.engine.cancel(ticket)
        self._news.set()

    def stop(self):
        """Ends the thread after the turn it is in."""
        self._stopping = True
        self._news.set()
        self._thread.join()

    def _run(self):
        while not self._stopping:
            if self.engine.idle:
                self._news.wait()
            self._news.clear()
            try:
                updates = self.engine.turn()
            except Exception as failure:  # whatever it is, callers must hear of it
                log.exception("the engine has failed")
                self._fail(failure)
                return
            with self._lock:
                for update in updates:
                    listener = self._listeners.get(update.ticket)
                    if update.finish is not None:
                        self._listeners.pop(update.ticket, None)
                    if listener is not None:
                        listener(update)

    def _fail(self, failure: Exception):
        with self._lock:
            self.failure = failure
            for listener in self._listeners.values():
                listener(None)
            self._listeners.clear()
