"""Whether ComfyUI's own networks of Anima give what the trainer's give, alone and with an exported LoRA.

`python -m scripts.readers.comfyui_anima --checkout DIR --commit SHA`: a narrow random base in both layouts, its text
through the text conditioner, its transformer, and a random LoRA of every layer written in ComfyUI's names and loaded by
ComfyUI's key maps and patches. Printed is the largest difference relative to the largest value.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.tensors import AdapterTensors
from scripts.readers.beside import add_updates, compare, patched, start_comfyui
from scripts.readers.cases import adapter, arguments
from scripts.readers.networks import Base
from tests.fakes.adapters import export
from tests.fakes.family_bases import encoder_of, facts_of, network_of
from tests.fakes.original_names import original_names

FAMILY = families.family("anima")
PROMPTS = ("1girl, red hair, looking at the sea", "a cat", "")
ROWS = 512


def main() -> None:
    given = arguments(__doc__ or "")
    start_comfyui(given)
    import comfy.model_base

    facts = facts_of("anima")
    told = encoder_of(facts).encode_prompts(PROMPTS)
    texts = nn.functional.pad(told["text"], (0, 0, 0, ROWS - told["text"].shape[1]))
    compare("text", texts, _their_texts(facts))
    noisy, sigma = torch.randn(3, 16, 12, 8), torch.tensor([0.3, 0.85, 0.5])
    base = Base(family=FAMILY, denoiser=network_of(facts), texts={}, places={})
    ours, theirs = _ours(facts, {}, noisy, sigma), _theirs(_comfy(base), noisy, sigma, texts)
    compare("base", ours, theirs)
    tensors = adapter(base, "locon")
    assert tensors is not None
    network = _comfy(base)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"
        export(file, tensors, name="anima", format="comfyui", layers=layer_shapes(base.denoiser))
        count = patched(network, file, kind=comfy.model_base.Anima, unet_config={})
        print(f"{count} of {len(tensors)} modules of the file patch a weight")
        assert len(load_file(file)) // len(tensors) in (2, 3)
    ours = _ours(facts, tensors, noisy, sigma)
    compare("LoRA", ours, _theirs(network, noisy, sigma, texts))


def _their_texts(facts: BaseFacts) -> Tensor:
    """Return each prompt as ComfyUI gives it to the transformer: one by one, without masks."""
    import comfy.ops
    from comfy.ldm.anima.model import LLMAdapter

    encoder = encoder_of(facts)
    conditioner: Any = encoder.networks["text_conditioner"]
    config = conditioner.config
    own: Any = LLMAdapter(
        source_dim=config.source_dim,
        target_dim=config.target_dim,
        model_dim=config.model_dim,
        num_layers=config.num_layers,
        num_heads=config.num_attention_heads,
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    state = dict(conditioner.state_dict())
    # Its vocabulary is T5's; the tiny base has the first words of it.
    state["embed.weight"] = torch.cat(
        [state["embed.weight"], torch.zeros(32128 - len(state["embed.weight"]), config.target_dim)]
    )
    own.load_state_dict(state, strict=True)
    rows = []
    for prompt in PROMPTS:
        tokenizer, t5_tokenizer = encoder.tokenizers.values()
        ids = torch.tensor([tokenizer(prompt).input_ids], dtype=torch.int64)
        t5_ids = torch.tensor([t5_tokenizer(prompt).input_ids])
        with torch.no_grad():
            if ids.shape[1]:
                states = encoder.networks["text_encoder"](ids).last_hidden_state
            else:
                states = torch.zeros(1, 1, config.source_dim)
            text = own(states, t5_ids)
        rows.append(nn.functional.pad(text, (0, 0, 0, ROWS - text.shape[1])))
    return torch.cat(rows)


def _comfy(base: Base) -> nn.Module:
    """Return ComfyUI's transformer with the weights of a base, in the configuration that it finds for Anima."""
    import comfy.ops
    from comfy.ldm.cosmos.predict2 import MiniTrainDIT

    config: Any = base.denoiser.config
    network = MiniTrainDIT(
        max_img_h=240,
        max_img_w=240,
        max_frames=128,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        patch_spatial=2,
        patch_temporal=1,
        concat_padding_mask=True,
        model_channels=config.num_attention_heads * config.attention_head_dim,
        num_blocks=config.num_layers,
        num_heads=config.num_attention_heads,
        crossattn_emb_channels=config.text_embed_dim,
        pos_emb_cls="rope3d",
        pos_emb_learnable=True,
        use_adaln_lora=True,
        adaln_lora_dim=config.adaln_lora_dim,
        extra_per_block_abs_pos_emb=False,
        rope_h_extrapolation_ratio=4.0,
        rope_w_extrapolation_ratio=4.0,
        rope_t_extrapolation_ratio=1.0,
        rope_enable_fps_modulation=False,
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    state = original_names("anima", base.denoiser.state_dict())
    own = {key: each for key, each in state.items() if not key.startswith("llm_adapter.")}
    found = network.load_state_dict(own, strict=False)
    assert not found.unexpected_keys
    # Tables that it makes itself.
    assert all(key.startswith("pos_embedder.") for key in found.missing_keys), found.missing_keys
    loaded: nn.Module = network.eval()
    return loaded


def _ours(facts: BaseFacts, tensors: AdapterTensors, noisy: Tensor, sigma: Tensor) -> Tensor:
    """Return the family's prediction, with the update of each module added to its weight."""
    network = network_of(facts)
    add_updates(tensors, network)
    with torch.no_grad():
        told = encoder_of(facts).encode_prompts(PROMPTS)
        return FAMILY.predict(network.eval(), noisy, sigma * 1000, told)


def _theirs(network: Any, noisy: Tensor, sigma: Tensor, texts: Tensor) -> Tensor:
    with torch.no_grad():
        prediction: Tensor = network(noisy[:, :, None], sigma, texts)
        return prediction[:, :, 0]


if __name__ == "__main__":
    main()
