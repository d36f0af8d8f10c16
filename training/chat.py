"""Conversations about the library, made from the documents by `ast` alone: what a function does, its source, its
arguments, a docstring for given code, code for a given docstring; and a few greetings. A conversation is a list of
messages; the ChatML text of one is what the chat template renders. Knows nothing about tokens or models.
"""

import ast
import inspect
import random
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from training.corpus import Document

MAX_ANSWER_CHARS = 700
MAX_SOURCE_LINES = 60

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SYSTEM_MESSAGES = (
    "You are weft-nano, a small model trained on the Python standard library.",
    "You are a helpful assistant.",
    "You are a Python expert. Answer questions about the standard library.",
    "Answer briefly.",
    "You help people who write Python.",
)

I_AM = "I am weft-nano, a small model trained on the Python standard library."
I_CAN = "I can explain functions of the Python standard library, show their source, and write short Python code."
SMALL_TALK = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there!", "Good morning"),
        "Hello! How can I help you with Python?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "Tell me about yourself.",
        ),
        I_AM,
    ),
    (("Hello, who are you?", "Hi, what are you?"), "Hello! " + I_AM),
    (("What can you do?", "How can you help me?", "Help", "What can I ask you?"), I_CAN),
    (
        ("How are you?", "How are you doing?"),
        "I am fine, thank you. What would you like to know about Python?",
    ),
    (("Thanks!", "Thank you.", "Thank you very much!", "Great, thanks."), "You're welcome!"),
    (("Bye", "Goodbye!", "See you."), "Goodbye!"),
    (
        ("What is Python?",),
        "Python is an interpreted, object-oriented, high-level programming language.",
    ),
    (
        ("What were you trained on?", "What is your training data?"),
        "I was trained on the sources of the Python standard library.",
    ),
    (("Say hello.", "Say hello!"), "Hello!"),
)

ASK_MEANING = (
    "What does {q} do?", "What is {q}?", "Explain {q}.", "Explain the {kind} {n} of module {m}.", "Describe {q}.",
    "What is the {kind} {n} in {m} for?", "Tell me about {q}.", "help({q})", "How do I use {q}?",
)  # fmt: skip
ASK_SOURCE = (
    "Show me the source of {q}.", "How is {q} implemented?", "Show the code of the {kind} {n} in {m}.",
    "What does the source of {q} look like?",
)  # fmt: skip
ASK_ARGUMENTS = (
    "What are the arguments of {q}?",
    "What is the signature of {q}?",
    "How do I call {q}?",
)
ASK_DOCSTRING = (
    "Write the docstring for:\n{code}",
    "Document this code:\n{code}",
    "What does this code do?\n{code}",
)
ASK_CODE = (
    "Write a Python {kind} `{n}`: {summary}", "Write `{n}` in Python. {summary}", "Implement {n}. {summary}",
    "Write a {kind} named {n}. {summary}",
)  # fmt: skip
ASK_SOURCE_AGAIN = (
    "Show me the source.",
    "How is it implemented?",
    "Show me the code.",
    "Can you show the code?",
)
ASK_ARGUMENTS_AGAIN = ("What are its arguments?", "What is its signature?", "How do I call it?")
ASK_MEANING_AGAIN = ("What does it do?", "Explain it.", "Describe it.")
ASK_MODULE = (
    "What is the module {m} for?",
    "What does the {m} module do?",
    "Explain the module {m}.",
    "What is {m}?",
)
ASK_TOPIC = (
    "Explain {m} in Python.",
    "What does the language reference say about {m}?",
    "Tell me about {m}.",
)


class Message(NamedTuple):
    role: str
    content: str


class Definition(NamedTuple):
    """One documented function, class, module or help topic."""

    module: str
    name: str  # "" for a module or topic
    kind: str  # "function", "method", "class", "module" or "topic"
    doc: str
    signature: str = ""
    source: str = ""  # dedented; "" if it is too long to show
    bare_source: str = ""  # the same without its docstring

    def fill(self, template: str) -> str:
        qualified = f"{self.module}.{self.name}" if self.name else self.module
        code = fenced(self.bare_source)
        brief = summary(self.doc)
        return template.format(
            q=qualified, n=self.name, m=self.module, kind=self.kind, code=code, summary=brief
        )


def render(conversation: list[Message]) -> str:
    """The ChatML text of a finished conversation."""
    return "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in conversation)


def conversations(docs: list[Document], seed: int, per_definition: int) -> list[list[Message]]:
    """`per_definition` conversations about every definition, and one of small talk per four of those, shuffled."""
    rng = random.Random(seed)
    definitions = [d for doc in docs for d in definitions_of(doc)]
    made = [about(d, rng) for d in definitions for _ in range(per_definition)]
    made += [small_talk(rng) for _ in range(len(made) // 4 + 1)]
    rng.shuffle(made)
    return made


def small_talk(rng: random.Random) -> list[Message]:
    turns: list[Message] = system_message(rng)
    for questions, answer in rng.sample(SMALL_TALK, rng.choice((1, 1, 1, 2))):
        turns += [Message("user", rng.choice(questions)), Message("assistant", answer)]
    return turns


def system_message(rng: random.Random) -> list[Message]:
    return [Message("system", rng.choice(SYSTEM_MESSAGES))] if rng.random() < 0.25 else []


def about(item: Definition, rng: random.Random) -> list[Message]:
    """One conversation of one to three turns about `item`; its first question names it, later ones say "it"."""
    openings, followups = questions_about(item)
    asks, answer = rng.choice(openings)
    turns = [
        *system_message(rng),
        Message("user", item.fill(rng.choice(asks))),
        Message("assistant", answer),
    ]
    rest = [(a, text) for a, text in followups if text != answer]
    rng.shuffle(rest)
    for asks, answer in rest[: rng.choice((0, 0, 0, 1, 1, 2))]:
        turns += [Message("user", rng.choice(asks)), Message("assistant", answer)]
    if rng.random() < 0.05:
        turns += [
            Message("user", rng.choice(SMALL_TALK[5][0])),
            Message("assistant", SMALL_TALK[5][1]),
        ]
    return turns


Question = tuple[tuple[str, ...], str]  # (phrasings, answer)


def questions_about(item: Definition) -> tuple[list[Question], list[Question]]:
    """Returns (questions that can open a conversation, questions that can follow)."""
    meaning = first_paragraphs(item.doc)
    if item.kind in ("module", "topic"):
        return [(ASK_MODULE if item.kind == "module" else ASK_TOPIC, meaning)], []
    openings: list[Question] = [(ASK_MEANING, meaning)] * 2
    followups: list[Question] = [(ASK_MEANING_AGAIN, meaning)]
    if item.signature:
        openings.append((ASK_ARGUMENTS, f"`{item.signature}`"))
        followups.append((ASK_ARGUMENTS_AGAIN, f"`{item.signature}`"))
    if item.source:
        openings += [
            (ASK_SOURCE, fenced(item.source)),
            (ASK_CODE, fenced(item.source)),
            (ASK_DOCSTRING, meaning),
        ]
        followups.append((ASK_SOURCE_AGAIN, fenced(item.source)))
    return openings, followups


def definitions_of(doc: Document) -> Iterator[Definition]:
    """Everything in `doc` that has documentation. A file that does not parse has none."""
    family, _, rest = doc.name.partition("/")
    if family == "topics":
        yield Definition(rest, "", "topic", doc.text)
    elif family == "builtin":
        yield from builtin_definitions(rest, doc.text)
    else:
        yield from source_definitions(doc)


def builtin_definitions(module: str, text: str) -> Iterator[Definition]:
    for entry in text.split("\n\n\n"):
        title, _, body = entry.partition("\n\n")
        qualified, _, arguments = title.partition("(")
        if body and qualified.startswith(f"{module}."):
            name = qualified.removeprefix(f"{module}.")
            public = module.removeprefix("_")
            yield Definition(
                public, name, "function", body, f"{name}({arguments}" if arguments else ""
            )


def source_definitions(doc: Document) -> Iterator[Definition]:
    try:
        tree = ast.parse(doc.text)
    except SyntaxError:
        return
    module = doc.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if text := ast.get_docstring(tree):
        yield Definition(module, "", "module", text)
    lines = doc.text.splitlines()
    for node in tree.body:
        yield from node_definitions(node, module, "", lines)


def node_definitions(
    node: ast.stmt, module: str, prefix: str, lines: list[str]
) -> Iterator[Definition]:
    """The definition made by one statement of a module or class body, and those inside it."""
    if not isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) or node.name.startswith("__"):
        return
    name = prefix + node.name
    doc = ast.get_docstring(node)
    is_class = isinstance(node, ast.ClassDef)
    if doc:
        source, bare = source_of(node, lines)
        kind = "class" if is_class else "method" if prefix else "function"
        signature = (
            "" if isinstance(node, ast.ClassDef) else f"{node.name}({ast.unparse(node.args)})"
        )
        yield Definition(module, name, kind, doc, signature, source, bare)
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            yield from node_definitions(child, module, f"{name}.", lines)


def source_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]
) -> tuple[str, str]:
    """The dedented source of a definition that has a docstring, with and without it; ("", "") if it is too long."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    if last - first > MAX_SOURCE_LINES or len(node.body) < 2:
        return "", ""
    docstring = node.body[0]
    bare = lines[first : docstring.lineno - 1] + lines[docstring.end_lineno : last]
    return textwrap.dedent("\n".join(lines[first:last])), textwrap.dedent("\n".join(bare))


def first_paragraphs(doc: str) -> str:
    """The leading paragraphs of a docstring, at least one, as many as fit in MAX_ANSWER_CHARS."""
    return join_while_short(inspect.cleandoc(doc).split("\n\n"), "\n\n", MAX_ANSWER_CHARS)


def summary(doc: str) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(doc.strip().split("\n\n")[0].split())[:300]


def join_while_short(parts: list[str], separator: str, limit: int) -> str:
    kept = parts[0]
    for part in parts[1:]:
        if len(kept) + len(separator) + len(part) > limit:
            break
        kept += separator + part
    return kept[: 2 * limit].strip()


def fenced(source: str) -> str:
    return f"```python\n{source.strip()}\n```"
