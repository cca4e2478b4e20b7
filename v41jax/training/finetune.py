"""A run from settings: the model to start from, its data, its stages, and the released checkpoint it ends in."""

import functools
import pathlib
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from v41jax import checkpoint, config_json, engram, model
from v41jax.config import Config
from v41jax.release import TOKENIZER
from v41jax.text import load_tokenizer
from v41jax.training import corpus, data, export, loop, lora, packing, qat, step
from v41jax.training.corpus import Corpus
from v41jax.training.optimizer import make_optimizer
from v41jax.training.passkey import PasskeyTask
from v41jax.training.settings import Settings, Stage

ROWS_A_PASS = 1 << 20  # of passkeys: practically, none returns


class Start(NamedTuple):
    """What a run starts from."""

    cfg: Config
    params: model.Params  # master weights, or packed ones with adapters
    directory: pathlib.Path  # has config.json, and tokenizer.json if there is one
    tokenizer: Tokenizer | None


def load_start(directory: pathlib.Path, *, seed: int, lora_rank: int = 0) -> Start:
    """Loads a released-layout directory, or, where it has no weights, draws random ones for its config.json.

    Raises ValueError for a directory that is neither, before any weight is read.
    """
    cfg, tokenizer = config_json.load_config(directory), load_tokenizer(directory)
    if any(directory.glob("*.safetensors")):
        _, params = checkpoint.load_checkpoint(directory, dtype=jnp.float32)
    else:
        params = model.init_params(cfg, jax.random.key(seed))
        if cfg.engram_layer_ids:
            params["token_map"] = jnp.asarray(engram.token_map(directory / TOKENIZER, cfg))
    params = lora.adapt(params, cfg=cfg, rank=lora_rank, seed=seed) if lora_rank else export.to_master(params)
    return Start(cfg, params, directory, tokenizer)


def load_corpus(start: Start, paths: tuple[str, ...], *, held_out: bool, cache: pathlib.Path) -> Corpus:
    """Reads the named files, or without any a half of the standard library."""
    if paths:
        return corpus.load(paths, start.tokenizer, cfg=start.cfg)
    if start.tokenizer is None:
        raise ValueError(f"{start.directory} has no {TOKENIZER}; name .npy token arrays as text")
    return corpus.built_in(start.tokenizer, held_out=held_out, cfg=start.cfg, cache=cache)


def make_batches(start: Start, text: Corpus, stage: Stage, *, settings: Settings) -> grain.DatasetIterator:
    """Packs the training text into the rows of a stage, mixes passkeys in, and shares rows among hosts."""
    share, multiple = settings.passkey_share, packing.multiple(start.cfg)
    length, batch_size = settings.rows(stage)
    seed = settings.seed + settings.stages.index(stage)  # no stage begins with the rows of the one before
    sources: list[tuple[data.RowSource, float]] = []
    if share < 1:
        sources.append((data.PackedRows(text, length, multiple=multiple), 1 - share))
    if share > 0:
        if start.tokenizer is None:
            raise ValueError(f"passkey_share={share} needs a {TOKENIZER} in {start.directory}; set it to 0")
        task = PasskeyTask(
            text, start.tokenizer, cfg=start.cfg, row_length=length, rows=ROWS_A_PASS, seed=seed, multiple=multiple
        )
        sources.append((task, share))
    return data.train_batches(
        sources, batch_size=batch_size, seed=seed, host=jax.process_index(), hosts=jax.process_count()
    )


def begin_stage(stage: Stage, params: model.Params, *, settings: Settings, cfg: Config):
    """Makes a stage's first state and its jitted step."""
    if not stage.caches:
        cfg = qat.without_quantized_caches(cfg)
    optimizer = make_optimizer(stage, params, cfg=cfg, weight_decay=settings.weight_decay)
    options = step.Options(
        stage=stage.kind,
        qat=stage.qat,
        kl_weight=settings.kl_weight,
        balance_weight=settings.balance_weight,
        bias_step=settings.bias_step,
        teacher=settings.teacher,
        micro_batches=settings.micro_batches,
        dtype=settings.dtype,
        clip=settings.clip,
    )
    state = step.init_state(params, optimizer)
    return state, functools.partial(step.train_step, cfg=cfg, optimizer=optimizer, options=options)


def finetune(start: Start, settings: Settings, *, output: pathlib.Path, tensorboard: bool = True) -> pathlib.Path:
    """Runs or continues a run in `output`, and writes the model it ends in.

    Returns:
      The directory of the released layout, `output`/model, which `scripts/generate.py --checkpoint` reads. Where
      `export_stages` is set, `output`/stages holds one for every stage before the last.
    Raises:
      ValueError: data or settings that cannot be trained on, an `output` with a run of other settings, or one whose
        model is already there.
    """
    target = output / "model"
    if target.exists():
        raise ValueError(f"{target} exists, so this run is finished; choose another output directory")
    for stage in settings.stages:
        if stage.kind == "drafts" and not start.cfg.num_nextn_predict_layers:
            raise ValueError(
                f"stage {stage.name!r} trains drafts, but {start.directory} has num_nextn_predict_layers=0; leave the"
                " stage out, or start from a config with 1 or more"
            )
    text = load_corpus(start, settings.text, held_out=False, cache=output / "data")
    for stage in settings.stages:  # what cannot be packed is refused before the first step
        make_batches(start, text, stage, settings=settings)
    save = functools.partial(save_model, start=start)

    def begin(stage: Stage, params: model.Params):
        batches = make_batches(start, text, stage, settings=settings)
        return *begin_stage(stage, params, settings=settings, cfg=start.cfg), batches

    def end_stage(stage: Stage, params: model.Params) -> None:
        path = output / "stages" / stage.name
        if settings.export_stages and stage != settings.stages[-1] and not path.exists():
            save(path, params)

    params = loop.train(
        begin,
        start.params,
        settings=settings,
        model=config_json.to_json(start.cfg),
        output=output,
        tensorboard=tensorboard,
        end_stage=end_stage,
    )
    save(target, params)
    return target


def save_model(path: pathlib.Path, params: model.Params, *, start: Start) -> None:
    """Writes master weights in the released layout, with the tokenizer the run started from."""
    tokenizer = start.directory / TOKENIZER
    checkpoint.save_checkpoint(
        path,
        export.to_release(params, cfg=start.cfg),
        cfg=start.cfg,
        tokenizer=tokenizer if tokenizer.is_file() else None,
    )
