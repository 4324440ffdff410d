"""The logits of OpenVINO, for the comparison only: python openvino_logits.py MODEL.gguf CHUNK THREADS.

Run it with an interpreter that has openvino-genai. Its pipelines give no logits, so the model that its GGUF reader
builds is saved, and compiled as they compile it: on the CPU with the default hints, which are then read back and told.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from pipe import serve, take_output

OUT = take_output()

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai  # noqa: E402

HINTS = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "EXECUTION_MODE_HINT")


def saved_by_the_reader(path: Path, folder: Path) -> openvino.Model:
    """It saves beside the file that it reads, so it gets a link in a folder of ours."""
    link = folder / path.name
    link.symlink_to(path)
    openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    return openvino.Core().read_model(folder / "openvino_model.xml")


def main(path: Path, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = saved_by_the_reader(path.resolve(), Path(folder))
        compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads})
        request = compiled.create_infer_request()

        def logits_of(ids: list[int]) -> Any:
            request.reset_state()
            inputs = {
                "input_ids": np.array([ids], np.int64),
                "attention_mask": np.ones((1, len(ids)), np.int64),
                "position_ids": np.arange(len(ids), dtype=np.int64)[np.newaxis],
                "beam_idx": np.zeros(1, np.int32),
            }
            request.infer(inputs)
            return request.get_tensor("logits").data[0]

        hints = {name: str(compiled.get_property(name)).split("'")[-2:][0] for name in HINTS}
        about = {"openvino": openvino.__version__, "openvino_genai": openvino_genai.__version__, "settings": hints}
        serve(about, logits_of, OUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]))
