"""A model folder for OpenVINO. convert_openvino.py SOURCE TARGET [int8]"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoTokenizer


def main() -> None:
    source, target, *bits = sys.argv[1:]
    quantization = OVWeightQuantizationConfig(bits=8, sym=True) if bits == ["int8"] else None
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, load_in_8bit=False, quantization_config=quantization
    )
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(target)
    try:
        import openvino
        from openvino_tokenizers import convert_tokenizer

        encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
        openvino.save_model(encoder, f"{target}/openvino_tokenizer.xml")
        openvino.save_model(decoder, f"{target}/openvino_detokenizer.xml")
    except Exception as exc:
        print(f"no tokenizer: {exc}", file=sys.stderr)


if __name__ == "__main__":
    main()
