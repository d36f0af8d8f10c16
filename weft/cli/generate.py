"""The verb `generate`: complete prompts without a server.

One prompt on the command line is answered on standard output, as the answer comes. Many prompts are
read as JSON lines:

    {"id": "a1", "prompt": "def f(", "max_new_tokens": 16, "temperature": 0}
    {"messages": [{"role": "user", "content": "Hello"}]}

with any sampling parameter by its name; parameters that a line does not set are taken from the
command line. Each line gives one output line

    {"id": "a1", "index": 0, "text": "...", "finish_reason": "stop", "prompt_tokens": 3, ...}

in the order in which completions end; "index" is the index of the input line. Log probabilities and
hidden states are there if the line asks for them. A line that cannot be run gives an output line
with "error", which with --output is in FILE.errors.

A file of completions is never emptied by accident: it is opened only when the model is ready. With
--input the same command goes on where an earlier run was stopped (`batches/file_run.py`); with
--prompt a file that already has content is refused unless --overwrite is given.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

from weft.config.engine import EngineConfig
from weft.config.options import (
    Command,
    Settings,
    SettingsError,
    asked_help,
    did_you_mean,
    option,
)
from weft.json_types import JsonObject

if TYPE_CHECKING:
    from weft.batches.file_run import EndedLine, Job, Results
    from weft.batches.forms.protocol import BadLine
    from weft.llm import LLM, Output
    from weft.messages.requests import GenerateRequest
    from weft.messages.sampling import SamplingParams

ABOUT = "Complete one prompt (--prompt) or a file of them (--input), without a server."


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompt: str = option("", "text to complete", group="generate", everyday=True)
    chat: bool = option(
        False, "take --prompt as a message, and answer it", group="generate", everyday=True
    )
    input: str = option(
        "", "file of JSON lines with prompts; - is standard input", group="generate", everyday=True
    )
    output: str = option(
        "",
        "file for the completions; standard output if not given",
        group="generate",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )
    overwrite: bool = option(
        False,
        "replace the file of --output if it has content; else --input goes on with it, and "
        "--prompt refuses it",
        group="generate",
        everyday=True,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters as options of `generate` and `chat`. Defaults are the recommendations of
    the model's makers, if there are any."""

    max_tokens: int = option(
        512,
        "longest completion, in tokens; 0: as long as the context allows",
        group="sampling",
        everyday=True,
        low=0,
    )
    temperature: float = option(
        1.0,
        "0 always takes the likeliest token; without it, a default of the model goes first",
        group="sampling",
        everyday=True,
        low=0.0,
        high=2.0,
    )
    top_p: float = option(
        1.0,
        "only the likeliest tokens of this total probability; likewise",
        group="sampling",
        everyday=True,
        low=0.0,
        high=1.0,
    )
    top_k: int = option(
        0,
        "only this number of likeliest tokens; 0: all; likewise",
        group="sampling",
        everyday=True,
        low=0,
    )
    min_p: float = option(
        0.0,
        "only tokens at least so likely, compared with the likeliest; likewise",
        group="sampling",
        low=0.0,
        high=1.0,
    )
    repetition_penalty: float = option(
        1.0,
        "above 1 makes repeated tokens less likely; likewise",
        group="sampling",
        low=0.01,
        high=10.0,
    )


def asked(settings: Settings) -> JsonObject:
    """The given values of `SamplingOptions`, by their names in the API. Without `max_tokens`,
    completions may be as long as the context allows."""
    options = {"max_tokens": SamplingOptions.max_tokens, **settings.given(SamplingOptions)}
    if not options["max_tokens"]:
        del options["max_tokens"]
    return options


def params_of(settings: Settings, defaults: SamplingParams) -> SamplingParams:
    """`defaults`, overridden by the given options."""
    import msgspec

    options = asked(settings)
    max_new_tokens = options.pop("max_tokens", None)
    return msgspec.structs.replace(defaults, max_new_tokens=max_new_tokens, **options)


def generate(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status: 1 if a line of the input could not be completed."""
    command = Command(
        "weft generate", ABOUT, GenerateOptions, SamplingOptions, EngineConfig, positional="model"
    )
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    options = settings.make(GenerateOptions)
    if bool(options.prompt) == bool(options.input):
        raise SettingsError("give either --prompt TEXT or --input FILE")

    _check_output(options)

    from weft.llm import LLM

    with ExitStack() as stack:
        source = _source(options.input, stack)
        llm = LLM.of(settings.make(EngineConfig))
        params = params_of(settings, llm.default_params)
        _check_output(options)  # loading takes long: another run may have written meanwhile
        if options.input:
            return _complete_lines(llm, options, source, params)
        return _complete_one(llm, options, params, _target(options.output, stack))


def _check_output(options: GenerateOptions) -> None:
    """Raises SettingsError if writing the file of --output would lose what it has."""
    path = Path(options.output)
    if not path.is_file():  # standard output, absent, or a device or a pipe: nothing can be lost
        return
    source = Path(options.input)
    if options.input not in ("", "-") and source.exists() and path.samefile(source):
        raise SettingsError(f"--input and --output are the same file, {path}")
    size = path.stat().st_size
    if size and options.prompt and not options.overwrite:
        raise SettingsError(
            f"{path} already has {size:,} bytes; --overwrite replaces them, another --output "
            "keeps them"
        )


def _source(name: str, stack: ExitStack) -> BinaryIO:
    """The named file, or standard input. Raises SettingsError."""
    if name in ("", "-"):
        return sys.stdin.buffer
    with _opening(name):
        return stack.enter_context(open(name, "rb"))


def _target(name: str, stack: ExitStack) -> IO[str]:
    """The named file, or standard output. Raises SettingsError."""
    if name in ("", "-"):
        return sys.stdout
    with _opening(name):
        return stack.enter_context(open(name, "w", encoding="utf-8"))


@contextmanager
def _opening(name: str) -> Iterator[None]:
    """Raises SettingsError if the named file cannot be opened."""
    try:
        yield
    except OSError as exc:
        raise SettingsError(f"cannot open {name}: {exc.strerror}") from exc


def _complete_one(
    llm: LLM, options: GenerateOptions, params: SamplingParams, target: IO[str]
) -> int:
    from weft.messages.sampling import InvalidParam

    prompt: str | list[int] = options.prompt
    try:
        if options.chat:
            prompt = llm.chat_ids([{"role": "user", "content": options.prompt}])
        for delta in llm.stream(prompt, params):
            target.write(delta.text)
            target.flush()
    except InvalidParam as exc:
        raise SettingsError(str(exc)) from exc
    target.write("\n")
    return 0


def _complete_lines(
    llm: LLM, options: GenerateOptions, source: BinaryIO, params: SamplingParams
) -> int:
    from weft.batches.file_run import FileRun, ResultFiles, num_lines
    from weft.batches.line_file import lines_in

    kind = PromptLines(llm, params)
    results: Results = Printed()
    if options.output not in ("", "-"):
        output = Path(options.output)
        if options.overwrite:
            output.unlink(missing_ok=True)
        results = ResultFiles(output, kind)
    path = Path(options.input)
    num = num_lines(path) if path.is_file() else 0
    return FileRun(lines_in(source), num, kind, results).run(kind.answers)


class Printed:
    """Results on standard output."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.errors = ""

    def write(self, ended: EndedLine) -> None:
        for line in ended.lines:
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Standard output stays open."""


class PromptWork(NamedTuple):
    """What a line asks for; `id` is the client's."""

    id: Any
    prompt: GenerateRequest


class PromptLines:
    """Lines with prompts and sampling parameters, which a model in this process completes. A line
    is known by its index and its id."""

    def __init__(self, llm: LLM, defaults: SamplingParams) -> None:
        self._llm = llm
        self._defaults = defaults

    def read(self, line: bytes, number: int) -> PromptWork:
        from weft.batches.forms.protocol import BadLine
        from weft.messages.sampling import InvalidParam

        id: Any = None
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError("it is not a JSON object")
            id = fields.pop("id", None)
            return PromptWork(id, _prompt(self._llm, fields, self._defaults))
        except InvalidParam as exc:
            raise BadLine(str(exc), id) from exc
        except (ValueError, TypeError, RecursionError) as exc:
            raise BadLine(f"this line cannot be read: {exc}", id) from exc

    def name(self, work: PromptWork, number: int) -> str:
        return _name(number, work.id)

    def name_of(self, result: JsonObject) -> str | None:
        if "index" not in result or "finish_reason" not in result:
            return None
        return _name(result["index"], result.get("id"))

    def bad(self, number: int, error: BadLine) -> JsonObject:
        return _error_line(number, error.custom_id, str(error))

    def answers(self, jobs: Iterator[Job]) -> Iterator[EndedLine]:
        from weft.batches.file_run import EndedLine

        asked: list[Job] = []  # all of this run: the model names them by their order

        def prompts() -> Iterator[GenerateRequest]:
            for job in jobs:
                asked.append(job)
                yield job.work.prompt

        for position, outputs in self._llm.complete(prompts(), strict=False):
            job = asked[position]
            yield EndedLine(
                [_line(job.number, job.work.id, output) for output in outputs],
                is_error=any(output.finish_reason == "error" for output in outputs),
                num_tokens=sum(output.completion_tokens for output in outputs),
            )


def _name(index: int, id: Any) -> str:
    return json.dumps([index, id])


def _prompt(llm: LLM, line: JsonObject, defaults: SamplingParams) -> GenerateRequest:
    import msgspec

    from weft.messages.sampling import SamplingParams

    kinds: JsonObject = {
        "prompt": str,
        "messages": list[JsonObject],
        "input_ids": list[int],
    }
    kinds_sent = [name for name in kinds if name in line]
    if len(kinds_sent) != 1:
        raise ValueError("one of prompt, messages and input_ids is expected")
    content = _converted(line.pop(kinds_sent[0]), kinds[kinds_sent[0]], kinds_sent[0])
    if "max_tokens" in line:
        line["max_new_tokens"] = line.pop("max_tokens")
    unknown = set(line) - set(SamplingParams.__struct_fields__)
    if unknown:
        wrong = min(unknown)
        known = [*kinds, "id", "max_tokens", *SamplingParams.__struct_fields__]
        raise ValueError(f"there is no key {wrong[:64]!r}{did_you_mean(wrong, known)}")
    params = _converted({**msgspec.structs.asdict(defaults), **line}, SamplingParams)
    if kinds_sent[0] == "messages":
        content = llm.chat_ids(content)
    return llm.prompt(content, params)


def _converted(value: Any, type: Any, within: str = "") -> Any:
    """`value` as a `type`. Raises ValueError, which names the wrong field, its value and what is
    allowed."""
    import msgspec

    from weft.messages.wrong_field import converted_field

    try:
        return msgspec.convert(value, type, str_keys=True)  # token ids as keys are texts in JSON
    except msgspec.ValidationError as exc:
        raise ValueError(converted_field(exc, value, type, within).text) from exc


def _error_line(index: int, id: Any, message: str) -> JsonObject:
    line: JsonObject = {} if id is None else {"id": id}
    line |= {"index": index, "text": "", "finish_reason": "error", "error": message}
    return line


def _line(index: int, id: Any, output: Output) -> JsonObject:
    line: JsonObject = {}
    if id is not None:
        line["id"] = id
    line |= {
        "index": index,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
    }
    if output.error:
        line["error"] = output.error
    if output.logprobs:
        line["logprobs"] = [
            {
                "token": token,
                "logprob": one.logprob,
                "top": list(zip(one.top_ids, one.top_logprobs, strict=True)),
                "of_ids": one.id_logprobs,
            }
            for token, one in zip(output.token_ids, output.logprobs, strict=False)
        ]
    if output.prompt_logprobs:
        line["prompt_logprobs"] = [one._asdict() for one in output.prompt_logprobs]
    if output.hidden_states is not None:
        line["hidden_states"] = output.hidden_states.tolist()
    return line
