"""Generation in one process, without a server: tokenizer, client and engine as the server has them,
without an event loop (`own_engine.py`).

    prompts ─▶ tokenizer ───▶ client ─ inbox ─▶ engine (scheduler, runner)
    outputs ◀─ detokenizer ◀─ client ◀──────────┘

It knows no process and no socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.assemble.adapters import adapter_files
from weft.assemble.prepare import (
    Prepared,
    load_processor,
    load_template,
    load_tokenizer,
    prepare,
)
from weft.client.adapters import AdapterNames, AdapterRefused
from weft.client.aux_outputs import PromptToken, hidden_state_rows, prompt_logprobs
from weft.client.checked_args import (
    PROMPT,
    as_conversations,
    as_items,
    as_messages,
    as_prompts,
    items_of,
    require_switch,
    require_text,
    wrong_value,
)
from weft.client.checked_params import PARAMS, with_tuples
from weft.client.generation import Completion, Delta, Generation
from weft.client.prompt import pack_input_embeds, placeholder_ids, with_reasoning_marks
from weft.client.prompt_reader import PromptReader, WithMedia
from weft.client.requests import checked, pack_ids
from weft.config.adapters import LoraPath, parse_lora_paths
from weft.config.engine import EngineConfig
from weft.config.media_options import MOST_PER_PROMPT, PER_PROMPT
from weft.config.model_errors import UnsupportedModel
from weft.config.numbers import MAX_N, shown
from weft.config.options import SettingsError, did_you_mean, options_by_name, options_of
from weft.json_types import JsonObject
from weft.messages.adapters import LoadLoraAdapter, UnloadLoraAdapter
from weft.messages.media import MediaItem
from weft.messages.replies import FinishReason, PooledPiece, TokenLogprobs
from weft.messages.requests import GenerateRequest, PoolingParams
from weft.messages.sampling import InvalidParam, SamplingParams, check_number
from weft.messages.status import EngineReady
from weft.messages.wakeup import WakeupPipe
from weft.observe.progress import Progress
from weft.own_engine import OwnEngine, require_unforked
from weft.text.media.fetch import Fetcher, MediaAccess
from weft.text.media.limits import MediaLimits
from weft.text.media.loader import MediaLoader, token_ids
from weft.text.parsers.formats import find_formats
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.journal.recorder import RecordedEngine

Message: TypeAlias = JsonObject  # as OpenAI writes it: {"role": "user", "content": "..."}
# Text, token ids, vectors [n, H], or {"prompt": text or ids, "images": [...]} (`client/media.py`).
Text: TypeAlias = str | Sequence[int] | NDArray[np.float32] | Mapping[str, Any]
Pair: TypeAlias = tuple[str, str]  # two texts that a model reads together

# Whoever writes the program may read any file, and give as much as the context holds.
MEDIA_ACCESS = MediaAccess(any_file=True)
MEDIA_LIMITS = MediaLimits(
    max_bytes=1_000_000_000,
    per_prompt=dict.fromkeys(PER_PROMPT, MOST_PER_PROMPT),
)
COMPLETED = "a list of what LLM.prompt returns"


@dataclass(frozen=True, kw_only=True)
class Output:
    """One completion."""

    text: str
    token_ids: list[int]  # with the stop token, if one ended it
    finish_reason: FinishReason
    matched: str | int | None  # the stop string or stop token that ended it
    error: str  # why, if the finish reason is "error" or "abort"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    logprobs: list[TokenLogprobs]  # one for each token, if asked for
    # One for each token of the prompt, if asked for; the first has none.
    prompt_logprobs: list[PromptToken]
    # float32 [n, hidden size], after the final norm, if asked for: of all tokens but the last of
    # the output, or of one token.
    hidden_states: NDArray[np.float32] | None = field(default=None, compare=False)


class LLM:
    """A model in this process, loaded and ready.

    `model` is a folder, a GGUF file, an id on the Hugging Face hub, or "" for the default:
    SmolLM2-135M-Instruct where it is installed, else the bundled weft-nano. Settings have the
    names that they have on the command line: `LLM("Qwen/Qwen3-0.6B", kv_tokens=20_000)`.
    Raises SettingsError and ModelError for what the user can correct. Threads may call it at the
    same time: their prompts share the engine's steps. It is closed by `close`, and at the end of
    `with LLM(...) as llm`; what is left open ends its threads and processes when it is collected.
    Processes that are forked from this one cannot use it, or another one.
    """

    def __init__(self, model: str | Path = "", **settings: Any) -> None:
        given = {"model": model, **settings}
        options = options_by_name(EngineConfig)
        checked: JsonObject = {}
        for name, value in given.items():
            if name not in options:
                hint = did_you_mean(name, options)
                raise SettingsError(f"LLM: there is no setting {name!r}{hint}")
            checked[name] = options[name].from_python(value, name)
        self._load(EngineConfig(**checked))

    @classmethod
    def of(cls, config: EngineConfig) -> LLM:
        """An LLM with these settings. Raises SettingsError and ModelError, as the constructor."""
        if not isinstance(config, EngineConfig):
            raise SettingsError(f"config is {shown(config)}; an EngineConfig is expected")
        for option in options_of(EngineConfig):
            value = getattr(config, option.name)
            if value != option.default:
                option.from_python(value, option.name)
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    @classmethod
    def composed(
        cls,
        prepared: Prepared,
        tokenizer: Tokenizer,
        engine: Engine | RecordedEngine,
        ready: EngineReady,
    ) -> LLM:
        """An LLM of parts that are there already."""
        llm = cls.__new__(cls)
        llm._compose(prepared, tokenizer, engine, ready, WakeupPipe(), _nothing)
        return llm

    def _load(self, config: EngineConfig) -> None:
        from weft.assemble.build import build_engine

        require_unforked()
        if not config.weights_root:
            # Who writes the program may read any folder; the root is for those who ask a server.
            config = replace(config, weights_root="/")
        prepared = prepare(config)
        tokenizer = load_tokenizer(prepared.folder)
        built = build_engine(prepared.config, prepared.folder)
        self._compose(prepared, tokenizer, built.engine, built.ready, built.wakeup, built.close)
        for asked in parse_lora_paths(prepared.config.lora_paths):
            self.load_adapter(asked.name, asked.path, pinned=asked.pinned)

    def _compose(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer,
        engine: Engine | RecordedEngine,
        ready: EngineReady,
        wakeup: WakeupPipe,
        end_engine: Callable[[], object],
    ) -> None:
        self.model = prepared.model
        self.config = prepared.config
        self.tokenizer = tokenizer
        # Of prompts without parameters of their own: the model's, unless the settings say
        # otherwise.
        self.default_params = prepared.sampling
        self._reasoning = find_formats("none", "auto", tokenizer.chat_templates.values()).reasoning
        self._own = OwnEngine(tokenizer, engine, ready, wakeup, end_engine)
        media = _media_loader(prepared, tokenizer)
        template = load_template(tokenizer)
        self._reader = PromptReader(prepared.model.name, tokenizer, template, media)
        self._numbers = itertools.count()  # of requests
        self._adapters = AdapterNames(adapter_files(prepared), prepared.model.name)
        # Open prompts: so few that the engine's queue never refuses one.
        self._window = max(1, prepared.config.max_queued_requests - MAX_N)

    def close(self) -> None:
        """End the threads and helper processes of the engine, and free the memory of the model.
        A prompt or an adapter that comes afterwards raises SettingsError."""
        self._own.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Generation

    def generate(
        self,
        prompts: Text | Sequence[Text],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str = "",
        progress: bool = False,
    ) -> list[Output]:
        """Complete one prompt or many, each a text, a list of token ids, an array of input
        embeddings, or a dictionary with a `prompt` and its `images`, `videos` and `audios`: each an
        address (data: or file:), base64, bytes, a path, or a picture of Pillow. They stand at the
        model's own marks in a text, or at their placeholders among ids.

        `params` are for all prompts, or one for each; without, it is `default_params`, of which a
        caller may change a few fields: `msgspec.structs.replace(llm.default_params, top_p=0.9)`.
        Returns the outputs in the order of the prompts: with `n` in the parameters, n for each
        prompt. `adapter`: the name of one. Raises InvalidParam, and then generates nothing
        more, for parameters out of range and for prompts that do not fit the context. Ctrl-C aborts
        what is open.
        """
        texts = as_prompts("prompts", prompts)
        require_switch("progress", progress)
        all_params = _params_of_each(params, self.default_params, len(texts))

        def nth(index: int) -> GenerateRequest:
            return self.prompt(texts[index], all_params[index], adapter=adapter)

        asked = self._named("prompts", len(texts), nth)
        by_position: list[list[Output]] = [[]] * len(texts)
        bar = Progress(len(texts), shown=progress)
        for position, completions in self.complete(asked):
            by_position[position] = completions
            bar.add(sum(output.completion_tokens for output in completions))
        bar.clear()
        outputs: list[Output] = []
        for completions in by_position:
            outputs += completions
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        adapter: str = "",
        progress: bool = False,
    ) -> list[Output]:
        """The assistant's answer to one conversation or to many. Content may be a list with
        pictures, videos and sounds, in OpenAI's form or as `generate` takes them. Errors as for
        `generate`."""
        prompts: Any = [self._reader.conversation(each) for each in as_conversations(messages)]
        return self.generate(prompts, params, adapter=adapter, progress=progress)

    def chat_ids(self, messages: Iterable[Message]) -> list[int]:
        """The token ids that a conversation becomes by the model's chat template."""
        return self._reader.conversation(as_messages("messages", messages)).ids

    def stream(
        self, prompt: Text, params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Iterator[Delta]:
        """Complete one prompt and yield what is new as it comes. Leaving the loop early aborts the
        rest."""
        if params is None:
            params = self.default_params
        request = self.prompt(prompt, params, adapter=adapter)
        own = self._own
        with own.submitted([request], stream=True) as generation:
            has_ended = False
            while not has_ended:
                with own.lock:
                    if not generation.ended:
                        own.step()
                    has_ended = generation.ended
                    deltas = generation.take()
                yield from deltas

    def prompt(self, text: Text, params: SamplingParams, *, adapter: str = "") -> GenerateRequest:
        """What `complete` takes. Raises InvalidParam for ids outside of the vocabulary, for vectors
        that do not fit the model, and for an unknown adapter."""
        vectors = b""
        media: tuple[MediaItem, ...] = ()
        given: Any = text
        if isinstance(text, Mapping):
            given = self._reader.parts(text)
        if isinstance(given, WithMedia):
            ids, media = given
        elif isinstance(given, np.ndarray):
            vectors = pack_input_embeds(given, self._own.facts)
            ids = placeholder_ids(vectors, self._own.facts)
        elif isinstance(given, str):
            ids = self.tokenizer.encode(given)
        else:
            ids = as_items("prompt", given, PROMPT)
        params = with_tuples(params)
        params = with_reasoning_marks(params, self._reasoning, self.tokenizer, ids)
        return GenerateRequest(
            rid=f"llm-{next(self._numbers)}",
            input_ids=pack_ids(ids, self._own.facts.vocab_size),
            sampling=params,
            vectors=vectors,
            media=media,
            adapter=self._uid_of(adapter),
        )

    def complete(
        self, prompts: Iterable[GenerateRequest | InvalidParam], *, strict: bool = True
    ) -> Iterator[tuple[int, list[Output]]]:
        """Keep the engine's queue filled from `prompts`; yield (position, outputs) of each as it
        ends.

        A prompt that cannot be run raises InvalidParam, or, if not `strict`, has one output that
        says why. An input that could not become a prompt may stand among the prompts as its error.
        Ctrl-C, and leaving the loop early, abort what is open.
        """
        require_switch("strict", strict)
        own = self._own
        waiting = enumerate(items_of("prompts", prompts, COMPLETED))
        following: tuple[int, GenerateRequest | InvalidParam] | None = None
        running: dict[int, Generation] = {}
        num_ended = 0
        are_all_sent = False
        try:
            while True:
                while not are_all_sent and own.num_open < self._window:
                    following = following or next(waiting, None)
                    if following is None:
                        are_all_sent = True
                        break
                    position, prompt = following
                    try:
                        with own.lock:
                            if own.num_open >= self._window:
                                break  # another thread was faster
                            running[position] = _submit(own, prompt)
                    except InvalidParam as exc:
                        if strict:
                            raise
                        yield position, [_refused(exc)]
                    following = None
                if are_all_sent and not running:
                    return
                own.step()
                if own.num_ended == num_ended:
                    continue
                num_ended = own.num_ended
                for position, generation in list(running.items()):
                    if generation.ended:
                        del running[position]
                        yield position, _outputs(generation)
        finally:
            own.leave(list(running.values()))

    # Adapters

    def load_adapter(self, name: str, path: str | Path, *, pinned: bool = False) -> None:
        """Load an adapter (LoRA) from a folder; prompts may name it from then on. A name that is in
        use stands for the new one.

        `path` may be relative to the working directory. `pinned`: it keeps a slot, and is never
        unloaded for another one. Raises SettingsError if it cannot be loaded.
        """
        require_text("name", name)
        if not isinstance(path, str | Path):
            raise wrong_value("path", path, "the path of a folder")
        require_switch("pinned", pinned)
        try:
            folder = str(Path(path).expanduser().absolute())
        except RuntimeError as exc:  # ~nobody
            raise wrong_value("path", path, "the path of a folder") from exc
        try:
            self._load_adapter(LoraPath(name, folder, pinned))
        except AdapterRefused as exc:
            raise SettingsError(f"the adapter {name!r} cannot be loaded: {exc}") from exc

    def _load_adapter(self, asked: LoraPath) -> None:
        found = self._adapters.find(asked, replaces=True)
        message = LoadLoraAdapter(
            lora_path=found.folder, uid=found.uid, lora_name=asked.name, pinned=asked.pinned
        )
        old = self._adapters.loaded(asked, found, self._own.ask(message))
        if old:
            self._own.ask(UnloadLoraAdapter(uid=old))

    def unload_adapter(self, name: str) -> None:
        """Let a name stand for no adapter. Raises SettingsError if it stands for none."""
        require_text("name", name)
        try:
            uid = self._adapters.remove(name)
        except AdapterRefused as exc:
            raise SettingsError(str(exc)) from exc
        if uid:
            self._own.ask(UnloadLoraAdapter(uid=uid))

    def _uid_of(self, adapter: str) -> str:
        require_text("adapter", adapter)
        if not adapter:
            return ""
        try:
            folder = self._adapters.offered(adapter)
            if folder:
                self._load_adapter(LoraPath(adapter, folder))
            return self._adapters.uid_of(adapter)
        except AdapterRefused as exc:
            raise InvalidParam("adapter", str(exc)) from exc

    # Vectors and scores

    def embed(
        self, inputs: Text | Sequence[Text], *, dimensions: int = 0, truncate: bool = False
    ) -> list[NDArray[np.float32]]:
        """The vector of each input, a text, token ids, or a prompt with pictures, of a model that
        makes vectors (`task="embed"`).

        `dimensions`: output dimensions to keep (Matryoshka); 0 keeps all. An input that is too long
        is refused, or cut if `truncate`. Raises InvalidParam, naming the input, and SettingsError
        if the model does not do this.
        """
        if type(dimensions) is not int or dimensions:
            check_number("dimensions", "dimensions", dimensions)
        own = self.model.pooling
        if own is not None and own.form == "tokens":
            message = "this model makes a vector for each token, which weft serve gives"
            raise InvalidParam("inputs", message)
        pooling = PoolingParams(dimensions=dimensions)
        return self._pool("embed", "inputs", as_prompts("inputs", inputs), pooling, truncate)

    def classify(
        self, inputs: Text | Sequence[Text], *, truncate: bool = False
    ) -> list[dict[str, float]]:
        """The probability of each label, by its name, for each input of a classifier.

        Errors as for `embed`.
        """
        labels: tuple[str, ...] = ()
        if self.model.pooling is not None:
            labels = self.model.pooling.labels
        found = []
        prompts = as_prompts("inputs", inputs)
        for scores in self._pool("classify", "inputs", prompts, PoolingParams(), truncate):
            by_label = dict(zip(labels, scores.tolist(), strict=True))
            found.append(by_label)
        return found

    def score(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> list[float]:
        """How well each document fits the query, by a model with one label (a cross-encoder).

        Errors as for `embed`.
        """
        require_text("query", query)
        pairs: list[Pair] = []
        for index, document in enumerate(as_items("documents", documents, "a list of texts")):
            require_text(f"documents[{index}]", document)
            pairs.append((query, document))
        all_scores = self._pool("classify", "documents", pairs, PoolingParams(), truncate)
        return [float(scores[0]) for scores in all_scores]

    def _pool(
        self,
        task: str,
        name: str,
        inputs: Sequence[Text | Pair],
        pooling: PoolingParams,
        truncate: bool,
    ) -> list[NDArray[np.float32]]:
        """The vector or the scores of each input; `name`: what the user calls them. The engine's
        queue gets as many inputs as it holds."""
        own = "generate" if self.model.pooling is None else self.model.pooling.task
        if own != task:
            raise SettingsError(
                f"{self.model.name} is used to {own}; this needs a model that can {task}"
            )
        require_switch("truncate", truncate)
        max_len = self._own.facts.max_prompt_tokens if truncate else None

        def nth(index: int) -> GenerateRequest:
            return self._pooled_prompt(inputs[index], pooling, max_len)

        prompts = list(self._named(name, len(inputs), nth))
        vectors: list[NDArray[np.float32]] = []
        for begin in range(0, len(prompts), self._window):
            window = prompts[begin : begin + self._window]
            with self._own.submitted(window) as generation:
                while not generation.ended:
                    self._own.step()
                for completion in generation.completions:
                    vectors.append(_vector(completion, f"{name}[{len(vectors)}]"))
        return vectors

    def _named(
        self, name: str, num: int, nth: Callable[[int], GenerateRequest]
    ) -> Iterator[GenerateRequest]:
        """The requests of `num` inputs. The InvalidParam of one of several names it."""
        for index in range(num):
            try:
                request = nth(index)
                checked(request, self._own.facts, self.tokenizer, clamps=False)
            except InvalidParam as exc:
                if num == 1:
                    raise
                raise InvalidParam(exc.param, f"{name}[{index}]: {exc}") from exc
            yield request

    def _pooled_prompt(
        self, one: Text | Pair, pooling: PoolingParams, max_len: int | None
    ) -> GenerateRequest:
        """An input of `_pool`. Of a pair, the model may know which tokens are of which text."""
        types: list[int] = []
        media: tuple[MediaItem, ...] = ()
        if isinstance(one, Mapping):
            one = self._reader.parts(one, may_be_cut=max_len is not None)
        if isinstance(one, WithMedia):
            one, media = one
        if isinstance(one, str) or _is_pair(one):
            ids, types = self.tokenizer.encode_input(one, max_len)
        else:
            ids = as_items("prompt", one, PROMPT)[:max_len]
        if self.model.num_token_types > 1 and any(types):
            pooling = msgspec.structs.replace(pooling, token_type_ids=bytes(types))
        return GenerateRequest(
            rid=f"llm-{next(self._numbers)}",
            input_ids=pack_ids(ids, self._own.facts.vocab_size),
            sampling=SamplingParams(max_new_tokens=0),
            pooling=pooling,
            media=media,
        )


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
    num_texts: int,
) -> list[SamplingParams]:
    if params is None:
        return [default] * num_texts
    if isinstance(params, SamplingParams):
        return [params] * num_texts
    found = as_items("params", params, f"{PARAMS}, or a list of these,")
    for index, own in enumerate(found):
        if not isinstance(own, SamplingParams):
            raise wrong_value(f"params[{index}]", own, PARAMS)
    if len(found) != num_texts:
        message = (
            f"params has the length {len(found):,}; {num_texts:,} is expected, an entry for "
            "each prompt"
        )
        raise InvalidParam("params", message)
    return found


def _submit(own: OwnEngine, prompt: GenerateRequest | InvalidParam) -> Generation:
    if isinstance(prompt, InvalidParam):
        raise prompt
    if not isinstance(prompt, GenerateRequest):
        raise wrong_value("an entry of prompts", prompt, "what LLM.prompt returns")
    return own.submit([prompt])


def _nothing() -> None:
    """Ends an engine that belongs to the caller."""


def _media_loader(prepared: Prepared, tokenizer: Tokenizer) -> MediaLoader | None:
    """None for a model of texts alone. Raises ModelError."""
    processor = load_processor(prepared)
    if processor is None:
        return None
    encode = partial(tokenizer.encode, add_special_tokens=False)
    try:
        ids = token_ids(processor, encode)
    except ValueError as exc:
        message = f"{prepared.model.name} is not served with pictures: {exc}"
        raise UnsupportedModel(message) from exc
    return MediaLoader(processor, ids, Fetcher(MEDIA_ACCESS), MEDIA_LIMITS)


def _is_pair(one: Text | Pair) -> TypeGuard[Pair]:
    return isinstance(one, tuple) and len(one) == 2 and all(isinstance(part, str) for part in one)


def _vector(completion: Completion, name: str) -> NDArray[np.float32]:
    """The vector [size] of the input `name`. Raises InvalidParam if it was refused."""
    assert completion.end is not None
    if completion.end.failed:
        raise InvalidParam("inputs", f"{name}: {completion.end.message}")
    [vector] = [extra.vector for extra in completion.aux_outputs if isinstance(extra, PooledPiece)]
    return np.frombuffer(vector, dtype=np.float32)


def _outputs(generation: Generation) -> list[Output]:
    """The completions of a prompt that has ended."""
    outputs = []
    for delta in generation.take():
        completion = generation.completions[delta.choice]
        outputs.append(_output(delta, completion))
    return outputs


def _output(delta: Delta, completion: Completion) -> Output:
    end = delta.end
    assert end is not None
    hidden_states = None
    if completion.spec.request.sampling.hidden_states is not None:
        hidden_states = hidden_state_rows(
            completion.aux_outputs, end.prompt_tokens, end.completion_tokens
        )
    return Output(
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=end.reason,
        matched=end.matched,
        error=end.message,
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        cached_tokens=end.cached_tokens,
        logprobs=delta.logprobs,
        prompt_logprobs=prompt_logprobs(completion.aux_outputs),
        hidden_states=hidden_states,
    )


def _refused(exc: InvalidParam) -> Output:
    return Output(
        text="",
        token_ids=[],
        finish_reason="error",
        matched=None,
        error=str(exc),
        prompt_tokens=0,
        completion_tokens=0,
        cached_tokens=0,
        logprobs=[],
        prompt_logprobs=[],
    )
