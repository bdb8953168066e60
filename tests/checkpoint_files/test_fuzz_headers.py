"""2,000 damaged headers of checkpoints and LoRA files: read, or refused in one line, fast and in little memory."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path

from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.locate import describe
from lora_trainer.lora_file.inspect import inspect_file
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import gguf, safetensors
from tests.fakes.mutations import damaged_header, mutated

STEM = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
BASES = (
    {"input_blocks.0.0.weight": (320, 4, 3, 3), "input_blocks.1.1.proj_in.weight": (320, 320),
     "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 1024)},
    {"img_in.weight": (3072, 64), "txt_in.weight": (3072, 4096), "guidance_in.in_layer.weight": (3072, 256),
     "vector_in.in_layer.weight": (3072, 768), "double_blocks.0.img_attn.qkv.weight": (9216, 3072),
     "single_blocks.0.linear1.weight": (21504, 3072)},
    {"x_embedder.proj.weight": (1536, 16, 2, 2), "context_embedder.weight": (1536, 4096),
     "joint_blocks.0.context_block.adaLN_modulation.1.weight": (9216, 1536), "pos_embed": (1, 36864, 1536),
     "y_embedder.mlp.0.weight": (1536, 2048)},
    {"double_stream_modulation_img.lin.weight": (18432, 3072), "txt_in.weight": (3072, 7680)},
    {"noise_refiner.0.attention.qkv.weight": (11520, 3840), "cap_pad_token": (1, 3840)},
    {"img_in.weight": (3072, 64), "txt_norm.weight": (3584,), "transformer_blocks.0.img_mod.1.weight": (18432, 3072)},
)  # fmt: skip
LORAS = (
    {f"{STEM}.lora_down.weight": (4, 8), f"{STEM}.lora_up.weight": (8, 4), f"{STEM}.alpha": ()},
    {f"{STEM}.hada_w1_a": (8, 4), f"{STEM}.hada_w1_b": (4, 8), f"{STEM}.hada_w2_a": (8, 4)},
    {"transformer.single_transformer_blocks.0.proj_mlp.lora_A.weight": (4, 8),
     "transformer.single_transformer_blocks.0.proj_mlp.lora_B.weight": (8, 4)},
)  # fmt: skip
COUNT, MOST_KIB = 2_000, 200_000


def test_damaged_headers_are_refused_in_one_line(tmp_path: Path) -> None:
    crashes = list[str]()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(COUNT):
        draw = random.Random(f"headers-{number}")
        is_base = number % 2 == 0
        case = Case("damaged", draw.choice(BASES if is_base else LORAS))
        as_gguf = is_base and number % 5 == 0
        header, body_bytes = gguf(case) if as_gguf else safetensors(case)
        data = mutated(header, draw) if as_gguf else damaged_header(header, draw)
        file = tmp_path / ("damaged.gguf" if as_gguf else "damaged.safetensors")
        with file.open("wb") as stream:
            stream.write(data)
            stream.truncate(len(data) + body_bytes)
        try:
            describe(BaseSettings(model=str(file))) if is_base else inspect_file(file)
        except InputError as error:
            assert "\n" not in str(error) and error.fix, str(error)
        except Exception as error:  # noqa: BLE001 - a crash is what is counted
            crashes.append(f"{number}: {type(error).__name__}: {str(error)[:120]}")
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert not crashes, f"{len(crashes)} of {COUNT}: " + "; ".join(crashes[:6])
    assert grown_kib < MOST_KIB


def test_a_gguf_that_promises_more_than_it_holds_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    for counts in ((2**60, 0), (0, 2**60), (900_000, 900_000)):
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
        try:
            describe(BaseSettings(model=str(file)))
        except InputError as error:
            assert "not a whole GGUF" in str(error)
        else:
            raise AssertionError("a header without its tensors was read")
