"""Released coding agents, each with a task that its scripted model solves: read a file, edit it,
run a command, end.

`packages` are pinned. The calls are in the words of each client's own tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

TASK = "Change hello.txt so that it says goodbye."
END = "The file says goodbye now."


Call: TypeAlias = tuple[str, dict[str, Any]]


class Client(NamedTuple):
    agent: str  # in `weft launch`
    packages: tuple[str, ...]
    installer: str  # npm or pip
    arguments: tuple[str, ...]
    calls: tuple[Call, ...] = ()
    again: Call | None = None  # once for each further turn, with its number instead of NUMBER
    says: tuple[str, ...] = ()  # answers without calls, for clients that read text
    after_install: tuple[str, ...] = ()  # scripts of packages, as they are installed without
    variables: tuple[tuple[str, str], ...] = ()
    tool_mark: str = "<functions>"  # a prompt without it is about a title
    full_at: int = 0  # bytes of a context that the task of `--full` fills; 0: it is not tried
    full_told: bool = (
        False  # it compacts before errors, by the size that it was told, or not at all
    )
    full_status: int = 0  # with which it ends after such errors
    python: str = ""  # the version that an installation by pip needs; "": this one


def clients(folder: Path) -> dict[str, Client]:
    """`folder`: where the clients work."""
    file = str(folder / "hello.txt")
    shell = "sed -i s/hello/goodbye/ hello.txt"
    return {
        "claude": Client(
            "claude",
            ("@anthropic-ai/claude-code@2.1.197",),
            "npm",
            ("-p", TASK, "--dangerously-skip-permissions", "--output-format", "json"),
            (
                ("Read", {"file_path": file}),
                ("Edit", {"file_path": file, "old_string": "hello", "new_string": "goodbye"}),
                ("Bash", {"command": "cat hello.txt", "description": "Shows the file"}),
            ),
            ("Bash", {"command": "echo NUMBER", "description": "Counts"}),
            after_install=("@anthropic-ai/claude-code/install.cjs",),
            variables=(("IS_SANDBOX", "1"),),
            full_at=140_000,
        ),
        "codex": Client(
            "codex",
            ("@openai/codex@0.171.0",),
            "npm",
            (
                *("exec", "--skip-git-repo-check"),
                *("--dangerously-bypass-approvals-and-sandbox", TASK),
            ),
            (
                ("exec_command", {"cmd": "cat hello.txt"}),
                ("exec_command", {"cmd": shell}),
                ("exec_command", {"cmd": "cat hello.txt"}),
            ),
            ("exec_command", {"cmd": "echo NUMBER"}),
            full_at=80_000,
            full_told=True,
        ),
        "opencode": Client(
            "opencode",
            ("opencode-ai@1.18.33",),
            "npm",
            ("run", TASK),
            (
                ("read", {"filePath": file}),
                ("edit", {"filePath": file, "oldString": "hello", "newString": "goodbye"}),
                ("bash", {"command": "cat hello.txt", "description": "Shows the file"}),
            ),
            ("bash", {"command": "echo NUMBER", "description": "Counts"}),
            after_install=("opencode-ai/postinstall.mjs",),
            full_at=110_000,
            full_status=1,
        ),
        "qwen": Client(
            "qwen",
            ("@qwen-code/qwen-code@0.15.10",),
            "npm",
            ("--yolo", "--prompt", TASK),
            (
                ("read_file", {"file_path": file}),
                ("edit", {"file_path": file, "old_string": "hello", "new_string": "goodbye"}),
                (
                    "run_shell_command",
                    {"command": "cat hello.txt", "is_background": False, "description": "Shows it"},
                ),
            ),
            (
                "run_shell_command",
                {"command": "echo NUMBER", "is_background": False, "description": "Counts"},
            ),
            full_at=140_000,
        ),
        "continue": Client(
            "continue",
            ("@continuedev/cli@1.5.47",),
            "npm",
            ("--auto", "--print", TASK),
            (
                ("Read", {"filepath": file}),
                ("Edit", {"file_path": file, "old_string": "hello", "new_string": "goodbye"}),
                ("Bash", {"command": "cat hello.txt"}),
            ),
            ("Bash", {"command": "echo NUMBER"}),
        ),
        "aider": Client(
            "aider",
            ("aider-chat==0.86.2",),
            "pip",
            (
                *("--yes-always", "--no-auto-commits", "--no-pretty", "--no-detect-urls"),
                *("--edit-format", "diff", "--message", TASK, "hello.txt"),
            ),
            says=(
                "hello.txt\n```\n<<<<<<< SEARCH\nhello\n=======\ngoodbye\n>>>>>>> REPLACE\n```\n",
                END,
            ),
            tool_mark="SEARCH",
        ),
        "mini": Client(
            "mini",
            ("mini-swe-agent==2.4.6",),
            "pip",
            ("--yolo", "--exit-immediately", "--cost-limit", "0", "--task", TASK),
            (
                ("bash", {"command": "cat hello.txt"}),
                ("bash", {"command": shell}),
                ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
            ),
            ("bash", {"command": "echo NUMBER"}),
        ),
        "openhands": Client(
            "openhands",
            ("openhands==1.16.0",),
            "pip",
            ("--headless", "--task", TASK),
            (
                ("file_editor", {"command": "view", "path": file, "security_risk": "LOW"}),
                (
                    "file_editor",
                    {"command": "str_replace", "path": file, "security_risk": "LOW"}
                    | {"old_str": "hello", "new_str": "goodbye"},
                ),
                ("terminal", {"command": "cat hello.txt", "security_risk": "LOW"}),
            ),
            ("terminal", {"command": "echo NUMBER", "security_risk": "LOW"}),
            python="3.12",
        ),
    }
