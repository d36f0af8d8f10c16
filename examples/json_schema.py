"""An answer that follows a JSON schema: the grammar allows no other tokens, whatever the model would have written."""

import json
import os

from openai import OpenAI

URL = os.environ.get("WEFT_URL", "http://127.0.0.1:30000")
SCHEMA = {
    "type": "object",
    "properties": {
        "module": {"type": "string", "maxLength": 20},
        "is_builtin": {"type": "boolean"},
        "since": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["module", "is_builtin", "since"],
    "additionalProperties": False,
}


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("WEFT_API_KEY", "none"))
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Describe the module os."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "module", "schema": SCHEMA, "strict": True},
        },
        max_tokens=100,
    )
    print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    main()
