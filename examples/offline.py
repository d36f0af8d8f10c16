"""Complete prompts without a server: the scheduler, the model and the tokenizer in this process."""

from weft import LLM, SamplingParams

PROMPTS = ["Water boils at", "The sun rises in", "def fibonacci(n):\n"]


def main() -> None:
    llm = LLM()  # the default model; LLM("Qwen/Qwen3-0.6B") downloads another
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    for output in llm.generate(PROMPTS, params):
        print(output.text)
        print("---")


if __name__ == "__main__":
    main()
