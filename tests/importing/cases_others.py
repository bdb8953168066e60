"""Cases of trainers with settings of their own: OneTrainer, ai-toolkit, musubi-tuner, diffusion-pipe, SimpleTuner."""

from __future__ import annotations

from tests.importing.cases_sd_scripts import CASES as SD_FAMILY
from tests.importing.corpus import REMOVED, Case, Usual

CONCEPT = {
    "name": "cat", "path": "C:\\images\\cat", "enabled": True, "type": "STANDARD", "seed": 3,
    "include_subdirectories": False, "image_variations": 1, "text_variations": 1, "balancing": 5.0,
    "balancing_strategy": "REPEATS", "loss_weight": 1.0,
    "image": {"enable_crop_jitter": True, "enable_random_flip": True, "enable_fixed_flip": False},
    "text": {"prompt_source": "sample", "enable_tag_shuffling": True, "tag_delimiter": ",", "keep_tags_count": 2},
}  # fmt: skip
ONE_SDXL = Usual(
    trainer="OneTrainer", version="v10", suffix=".json",
    data={
        "__version": 10, "training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE",
        "base_model_name": "stabilityai/stable-diffusion-xl-base-1.0", "workspace_dir": "workspace/run",
        "output_model_destination": "models/cat.safetensors", "output_model_format": "SAFETENSORS",
        "output_dtype": "FLOAT_16", "train_dtype": "BFLOAT_16", "resolution": "1024", "epochs": 10,
        "batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 3e-4,
        "learning_rate_scheduler": "COSINE", "learning_rate_warmup_steps": 0.1, "learning_rate_cycles": 1.0,
        "lora_rank": 32, "lora_alpha": 16.0, "peft_type": "LORA", "dropout_probability": 0.0,
        "layer_filter_preset": "attn-mlp", "layer_filter": "attentions",
        "unet": {"train": True, "learning_rate": None, "weight_dtype": "FLOAT_16"},
        "text_encoder": {"train": False, "weight_dtype": "FLOAT_16"},
        "text_encoder_2": {"train": False, "weight_dtype": "FLOAT_16"},
        "optimizer": {"optimizer": "ADAMW_8BIT", "beta1": 0.9, "beta2": 0.99, "eps": 1e-8,
                      "weight_decay": 0.02, "fused": False, "min_8bit_size": 4096},
        "loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": 7.0, "ema": "OFF",
        "offset_noise_weight": 0.03, "concepts": [CONCEPT], "samples": None,
        "save_every": 2, "save_every_unit": "EPOCH",
    },
)  # fmt: skip
ONE_FLUX = Usual(
    trainer="OneTrainer", version="23df383", suffix=".json",
    data={
        "base_model_name": "black-forest-labs/FLUX.1-dev", "batch_size": 4, "learning_rate": 3e-4,
        "model_type": "FLUX_DEV_1", "output_model_format": "DIFFUSERS_LORA", "resolution": "768",
        "transformer": {"train": True, "weight_dtype": "NFLOAT_4"},
        "text_encoder": {"train": False, "weight_dtype": "BFLOAT_16"},
        "training_method": "LORA", "train_dtype": "BFLOAT_16", "timestep_distribution": "LOGIT_NORMAL",
        "dynamic_timestep_shifting": True,
    },
)  # fmt: skip
ONETRAINER = [
    ONE_SDXL.case("usual"),
    ONE_FLUX.case("flux preset"),
    ONE_FLUX.case("flux with clip trained", {"text_encoder/train": True}),
    ONE_FLUX.case("shifted by hand", {"dynamic_timestep_shifting": False, "timestep_shift": 1.8,
                                      "noising_weight": 0.5, "noising_bias": 0.2}),
    ONE_FLUX.case("log cosh", {"mse_strength": 0.0, "log_cosh_strength": 1.0}),
    ONE_FLUX.case("heavy tail", {"timestep_distribution": "HEAVY_TAIL", "noising_weight": 1.29}),
    ONE_FLUX.case("parabola", {"timestep_distribution": "INVERTED_PARABOLA", "noising_weight": 7.7}),
    ONE_FLUX.case("int8 by products", {"transformer/weight_dtype": "INT_W8A8"}),
    ONE_FLUX.case("several resolutions", {"resolution": "512,768,1024"}),
    ONE_SDXL.case("dadapt adam", {"optimizer": {"optimizer": "DADAPT_ADAM", "d_coef": 1.0}, "learning_rate": 1.0}),
    ONE_SDXL.case("prodigy plus", {"optimizer": {"optimizer": "PRODIGY_PLUS_SCHEDULE_FREE"}, "learning_rate": 1.0}),
    ONE_SDXL.case("lamb", {"optimizer": {"optimizer": "LAMB"}}),
    ONE_SDXL.case("rate scaled by batch", {"learning_rate_scaler": "BOTH"}),
    ONE_SDXL.case("dora", {"lora_decompose": True}),
    ONE_SDXL.case("oft", {"peft_type": "OFT_2", "oft_block_size": 32, "lora_alpha": REMOVED}),
    ONE_SDXL.case("masks", {"masked_training": True, "unmasked_weight": 0.2, "unmasked_probability": 0.0}),
    ONE_SDXL.case("average", {"ema": "GPU", "ema_decay": 0.99}),
    ONE_SDXL.case("both text encoders", {"text_encoder": {"train": True, "learning_rate": 1e-5},
                                         "text_encoder_2": {"train": True, "learning_rate": 2e-5}}),
    ONE_SDXL.case("concepts in their file", {"concepts": None, "concept_file_name": "training_concepts/cat.json"},
                  beside={"cat.json": [CONCEPT]}),
    ONE_SDXL.case("half a weight", {"concepts": [CONCEPT, {**CONCEPT, "path": "C:\\images\\dog", "loss_weight": 0.5}]}),
    ONE_SDXL.case("no weight", {"concepts": [CONCEPT, {**CONCEPT, "path": "C:\\images\\dog", "loss_weight": 0}]},
                  refused="data.folders.dog.weight=0"),
    ONE_SDXL.case("concepts of all kinds", {
        "min_noising_strength": 1e308,
        "samples": [{"prompt": "a cat", "seed": 3, "diffusion_steps": 20}, {"prompt": "a dog", "enabled": False}],
        "concepts": [
            {**CONCEPT, "balancing": 2.4, "image": {"enable_resolution_override": True, "resolution_override": "640"},
             "text": {"prompt_source": "filename", "enable_tag_shuffling": True, "tag_delimiter": "|",
                      "keep_tags_count": 2, "tag_dropout_enable": True, "tag_dropout_mode": "RANDOM",
                      "tag_dropout_probability": 0.3}},
            {**CONCEPT, "path": "C:\\images\\dog", "type": "PRIOR_PREDICTION", "balancing_strategy": "SAMPLES",
             "text": {"prompt_source": "concept", "prompt_path": "dog.txt"}},
            {**CONCEPT, "path": "C:\\images\\held", "type": "VALIDATION"}]}),
    ONE_SDXL.case("epochs of whole batches", {"concepts": [{**CONCEPT, "path": "images"}], "batch_size": 3}),
    ONE_SDXL.case("huber", {"mse_strength": 0.0, "huber_strength": 1.0, "huber_delta": 0.3}),
    ONE_SDXL.case("p2", {"loss_weight_fn": "P2", "loss_weight_strength": 1.0}),
    ONE_SDXL.case("debiased", {"loss_weight_fn": "DEBIASED_ESTIMATION"}),
    ONE_SDXL.case("part of the noise", {"min_noising_strength": 0.2, "max_noising_strength": 0.9}),
    ONE_FLUX.case("cosine map", {"timestep_distribution": "COS_MAP"}),
    ONE_FLUX.case("part of the noise of flux", {"min_noising_strength": 0.2, "max_noising_strength": 0.9,
                                                "dynamic_timestep_shifting": False}),
    ONE_SDXL.case("restarts", {"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS", "learning_rate_cycles": 3.0,
                               "concepts": [{**CONCEPT, "path": "images"}]}),
    ONE_SDXL.case("embedding", {"training_method": "EMBEDDING"}, refused="training_method=EMBEDDING"),
    ONE_SDXL.case("anima", {"model_type": "ANIMA"}, refused="ANIMA"),
]  # fmt: skip
TOOLKIT = Usual(
    trainer="ai-toolkit", version="27a03a9", suffix=".yaml",
    data={
        "job": "extension",
        "config": {"name": "my_lora", "process": [{
            "type": "sd_trainer", "training_folder": "output", "device": "cuda:0", "trigger_word": "ohwx",
            "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
            "save": {"dtype": "float16", "save_every": 250, "max_step_saves_to_keep": 4},
            "datasets": [{"folder_path": "/images/cat", "caption_ext": "txt", "caption_dropout_rate": 0.05,
                          "shuffle_tokens": False, "cache_latents_to_disk": True, "resolution": [512, 768]}],
            "train": {"batch_size": 1, "steps": 2000, "gradient_accumulation_steps": 1, "train_unet": True,
                      "train_text_encoder": False, "gradient_checkpointing": True,
                      "noise_scheduler": "flowmatch", "optimizer": "adamw8bit", "lr": "1e-4", "dtype": "bf16",
                      "ema_config": {"use_ema": True, "ema_decay": 0.99}},
            "model": {"name_or_path": "black-forest-labs/FLUX.1-dev", "is_flux": True, "quantize": True},
            "sample": {"sampler": "flowmatch", "sample_every": 250, "width": 1024, "height": 1024,
                       "prompts": ["[trigger] on a beach"], "neg": "", "seed": 42, "walk_seed": True,
                       "guidance_scale": 4, "sample_steps": 20},
        }]},
        "meta": {"name": "[name]", "version": "1.0"},
    },
)  # fmt: skip
AT = "config/process/0"
AI_TOOLKIT = [
    TOOLKIT.case("usual"),
    TOOLKIT.case("qwen of the interface", {
        f"{AT}/type": "diffusion_trainer", f"{AT}/model": {
            "name_or_path": "Qwen/Qwen-Image", "arch": "qwen_image", "quantize": True, "qtype": "uint3|some/adapter",
            "quantize_te": True, "qtype_te": "qfloat8", "low_vram": True},
        f"{AT}/train/timestep_type": "weighted", f"{AT}/sqlite_db_path": "./aitk_db.db"}),
    TOOLKIT.case("sdxl", {f"{AT}/model": {"name_or_path": "sdxl.safetensors", "is_xl": True},
                          f"{AT}/train/train_text_encoder": True, f"{AT}/train/min_snr_gamma": 5.0,
                          f"{AT}/train/noise_scheduler": "ddpm"}),
    TOOLKIT.case("lokr", {f"{AT}/network": {"type": "lokr", "lokr_full_rank": True, "lokr_factor": 8}}),
    TOOLKIT.case("automagic", {f"{AT}/train/optimizer": "automagic", f"{AT}/train/lr": 1e-6}),
    TOOLKIT.case("adafactor", {f"{AT}/train/optimizer": "adafactor", f"{AT}/train/lr": 3e-4}),
    TOOLKIT.case("prodigy below its rate", {f"{AT}/train/optimizer": "prodigy", f"{AT}/train/lr": 1e-4}),
    TOOLKIT.case("linear timesteps", {f"{AT}/train/timestep_type": "linear"}),
    TOOLKIT.case("shifted by size", {f"{AT}/train/timestep_type": "flux_shift"}),
    TOOLKIT.case("content", {f"{AT}/train/content_or_style": "content"}),
    TOOLKIT.case("rates of parts", {f"{AT}/model": {"name_or_path": "sdxl.safetensors", "is_xl": True},
                                    f"{AT}/train/noise_scheduler": "ddpm", f"{AT}/train/unet_lr": 3e-4,
                                    f"{AT}/train/train_text_encoder": True, f"{AT}/train/text_encoder_lr": 5e-5}),
    TOOLKIT.case("the noisier half", {f"{AT}/train/timestep_type": "linear", f"{AT}/train/max_denoising_steps": 499}),
    TOOLKIT.case("the cleaner half", {f"{AT}/train/min_denoising_steps": 500}),
    TOOLKIT.case("gamma over snr", {f"{AT}/model": {"name_or_path": "sdxl.safetensors", "is_xl": True},
                                    f"{AT}/train/noise_scheduler": "ddpm", f"{AT}/train/snr_gamma": 5.0}),
    TOOLKIT.case("uploads to nowhere", {f"{AT}/save": {"push_to_hub": True}}),
    TOOLKIT.case("pseudo huber", {f"{AT}/train/loss_type": "pseudo_huber"}),
    TOOLKIT.case("cosine", {f"{AT}/train/lr_scheduler": "cosine"}),
    TOOLKIT.case("warm-up", {f"{AT}/train/lr_scheduler": "constant_with_warmup",
                             f"{AT}/train/lr_scheduler_params": {"num_warmup_steps": 200}}),
    TOOLKIT.case("linear", {f"{AT}/train/lr_scheduler": "linear"}),
    TOOLKIT.case("zimage turbo", {f"{AT}/model": {
        "name_or_path": "Tongyi-MAI/Z-Image-Turbo", "arch": "zimage:turbo",
        "assistant_lora_path": "ostris/zimage_turbo_training_adapter/v2.safetensors"}}),
    TOOLKIT.case("regularisation", {f"{AT}/datasets": [
        {"folder_path": "/images/cat", "resolution": 512, "num_repeats": 4},
        {"folder_path": "/images/cats", "resolution": 512, "is_reg": True}]}),
    TOOLKIT.case("convolutions and a prior", {
        f"{AT}/model": {"name_or_path": "sdxl.safetensors", "is_xl": True}, f"{AT}/train/noise_scheduler": "ddpm",
        f"{AT}/network": {"type": "lora", "linear": 8, "conv": 4, "conv_alpha": 2}, f"{AT}/datasets": [
            {"folder_path": "/images/cat", "resolution": 512, "loss_multiplier": 1},
            {"folder_path": "/images/cats", "resolution": 768, "is_reg": True, "prior_reg": True}]}),
    TOOLKIT.case("keeps the class", {f"{AT}/train/diff_output_preservation": True,
                                     f"{AT}/train/diff_output_preservation_class": "woman"}),
    TOOLKIT.case("accumulated", {f"{AT}/train/gradient_accumulation_steps": 4, f"{AT}/train/batch_size": 2}),
    TOOLKIT.case("shuffled", {f"{AT}/datasets/0/shuffle_tokens": True}),
    TOOLKIT.case("control images", {f"{AT}/datasets/0/control_path": "/images/depth"}, refused="control_path"),
    TOOLKIT.case("wan", {f"{AT}/model": {"name_or_path": "Wan-AI/x", "arch": "wan22_14b"}}, refused="wan22_14b"),
    TOOLKIT.case("a slider", {f"{AT}/type": "slider"}, refused="type=slider"),
]  # fmt: skip
MUSUBI = Usual(
    trainer="musubi-tuner", version="30c658c", suffix=".toml",
    data={
        "dit": "/m/qwen_image_bf16.safetensors", "vae": "/m/vae.safetensors", "text_encoder": "/m/qwen.safetensors",
        "dataset_config": "data.toml", "sdpa": True, "mixed_precision": "bf16", "fp8_base": True, "fp8_scaled": True,
        "timestep_sampling": "qwen_shift", "weighting_scheme": "none", "optimizer_type": "adamw8bit",
        "learning_rate": 5e-5, "gradient_checkpointing": True, "max_data_loader_n_workers": 2,
        "persistent_data_loader_workers": True, "network_module": "networks.lora_qwen_image", "network_dim": 16,
        "max_train_steps": 1200, "save_every_n_epochs": 1, "seed": 42, "output_dir": "/o", "output_name": "cat",
    },
    beside={"data.toml": {
        "general": {"resolution": [1024, 1024], "caption_extension": ".txt", "batch_size": 2, "enable_bucket": True},
        "datasets": [{"image_directory": "/images/cat", "cache_directory": "/c", "num_repeats": 2}],
    }},
)  # fmt: skip
MUSUBI_TUNER = [
    MUSUBI.case("usual"),
    MUSUBI.case("zimage", {"network_module": "networks.lora_zimage", "timestep_sampling": "shift",
                           "discrete_flow_shift": 2.0}),
    MUSUBI.case("flux 2", {"network_module": "networks.lora_flux_2", "model_version": "klein-base-4b",
                           "timestep_sampling": "flux2_shift"}),
    MUSUBI.case("by its defaults", {"timestep_sampling": REMOVED, "network_dim": REMOVED, "max_train_steps": REMOVED,
                                    "learning_rate": REMOVED, "optimizer_type": REMOVED, "mixed_precision": REMOVED}),
    MUSUBI.case("logit of snr", {"timestep_sampling": "logsnr", "logit_mean": -6.0, "logit_std": 2.0}),
    MUSUBI.case("by density", {"timestep_sampling": "sigma", "weighting_scheme": "logit_normal", "logit_mean": 0.5,
                               "logit_std": 0.8, "discrete_flow_shift": 3.0}),
    MUSUBI.case("part of the noise", {"timestep_sampling": "shift", "discrete_flow_shift": 2.2,
                                      "min_timestep": 100, "max_timestep": 900}),
    MUSUBI.case("zimage by the shift of flux", {"network_module": "networks.lora_zimage",
                                                "timestep_sampling": "flux_shift", "sigmoid_scale": 1.5}),
    MUSUBI.case("prodigy", {"optimizer_type": "prodigyopt.Prodigy", "learning_rate": 1.0}),
    MUSUBI.case("came", {"optimizer_type": "came_pytorch.CAME", "optimizer_args": ["weight_decay=0.02"]}),
    MUSUBI.case("wide images", beside={"data.toml": {
        "general": {"resolution": [960, 544]}, "datasets": [{"image_directory": "/images/cat"}]}}),
    MUSUBI.case("two folders", beside={"data.toml": {
        "general": {"resolution": 768, "batch_size": 1, "enable_bucket": True}, "datasets": [
            {"image_directory": "/images/cat", "num_repeats": 3}, {"image_directory": "/images/dog"}]}}),
    MUSUBI.case("videos", beside={"data.toml": {"datasets": [
        {"video_directory": "/v", "image_directory": "/i", "target_frames": [1]}]}}, refused="video_directory"),
    MUSUBI.case("a table of images", {"timestep_sampling": "qinglong_flux"}, beside={"data.toml": {"datasets": [
        {"image_jsonl_file": "/images/cat/all.jsonl", "batch_size": 2, "enable_bucket": True},
        {"image_directory": "/images/cat/dog", "batch_size": 3, "enable_bucket": False}]}}),
    MUSUBI.case("wan", {"network_module": "networks.lora_wan"}, refused="lora_wan"),
    MUSUBI.case("edit", {"model_version": "edit-2511"}, refused="edit-2511"),
    MUSUBI.case("cosine with a share of warm-up", {"lr_scheduler": "cosine", "lr_warmup_steps": 0.05}),
]  # fmt: skip
PIPE = Usual(
    trainer="diffusion-pipe", version="8f83dbf", suffix=".toml",
    data={
        "output_dir": "/o", "dataset": "data.toml", "epochs": 1000, "max_steps": 3000,
        "micro_batch_size_per_gpu": 1, "pipeline_stages": 1, "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0, "warmup_steps": 30, "eval_every_n_epochs": 1, "eval_before_first_step": True,
        "eval_micro_batch_size_per_gpu": 1, "eval_gradient_accumulation_steps": 1, "save_every_n_steps": 250,
        "checkpoint_every_n_minutes": 120, "activation_checkpointing": True, "partition_method": "parameters",
        "save_dtype": "bfloat16", "caching_batch_size": 8, "steps_per_print": 1, "blocks_to_swap": 8,
        "model": {"type": "qwen_image", "diffusers_path": "/m/Qwen-Image", "dtype": "bfloat16",
                  "transformer_dtype": "float8", "timestep_sample_method": "logit_normal"},
        "adapter": {"type": "lora", "rank": 32, "dtype": "bfloat16"},
        "optimizer": {"type": "adamw_optimi", "lr": 2e-5, "betas": [0.9, 0.99], "weight_decay": 0.01, "eps": 1e-8},
    },
    beside={"data.toml": {
        "resolutions": [1024], "enable_ar_bucket": True, "min_ar": 0.5, "max_ar": 2.0, "num_ar_buckets": 7,
        "frame_buckets": [1], "directory": [{"path": "/images/cat", "num_repeats": 1}],
    }},
)  # fmt: skip
DIFFUSION_PIPE = [
    PIPE.case("usual"),
    PIPE.case("automagic", {"optimizer": {"type": "automagic", "weight_decay": 0.01}}),
    PIPE.case("kahan", {"optimizer/type": "AdamW8bitKahan", "optimizer/stabilize": False}),
    PIPE.case("prodigy", {"optimizer": {"type": "Prodigy", "lr": 1}}),
    PIPE.case("flux shifted", {"model": {"type": "flux", "diffusers_path": "/m/FLUX.1-dev", "dtype": "bfloat16",
                                         "flux_shift": True}}),
    PIPE.case("chroma beside flux", {"model": {
        "type": "chroma", "diffusers_path": "/m/FLUX.1-dev", "transformer_path": "/m/chroma.safetensors",
        "dtype": "bfloat16", "transformer_dtype": "float8", "flux_shift": True}}),
    PIPE.case("sdxl", {"model": {"type": "sdxl", "checkpoint_path": "/m/sdxl.safetensors", "dtype": "bfloat16",
                                 "unet_lr": 4e-5, "text_encoder_1_lr": 2e-5, "text_encoder_2_lr": 2e-5,
                                 "min_snr_gamma": 5}}),
    PIPE.case("zimage turbo", {"model": {
        "type": "z_image", "diffusion_model": "/m/z.safetensors", "vae": "/m/ae.safetensors", "dtype": "bfloat16",
        "text_encoders": [{"path": "/m/qwen.safetensors", "type": "lumina2"}],
        "merge_adapters": ["/m/adapter.safetensors"]}}),
    PIPE.case("lokr of whole matrices", {"adapter": {"type": "lokr", "rank": 1000000, "decompose_factor": 4,
                                                     "dtype": "bfloat16"}}),
    PIPE.case("huber", {"pseudo_huber_c": 0.5}),
    PIPE.case("part of the noise", {"model/min_t": 0.5, "model/max_t": 1}),
    PIPE.case("two shifts", {"model/flux_shift": True, "model/shift": 2}),
    PIPE.case("repeats of nothing", beside={"data.toml": {"resolutions": [1024], "directory": [
        {"path": "/images/cat", "num_repeats": 0}, {"path": "/images/dog"}]}}, refused="repeats=0"),
    PIPE.case("smooth l1", {"smooth_l1_beta": 0.3}),
    PIPE.case("cosine", {"lr_scheduler": "cosine", "max_steps": REMOVED, "epochs": 100, "save_every_n_epochs": 5},
              beside={"data.toml": {"resolutions": [1024], "enable_ar_bucket": True, "min_ar": 0.5, "max_ar": 2.0,
                                    "num_ar_buckets": 7, "directory": [{"path": "images", "num_repeats": 10}]}}),
    PIPE.case("two resolutions and folders", beside={"data.toml": {
        "resolutions": [512, 1024], "enable_ar_bucket": False, "directory": [
            {"path": "/images/a", "num_repeats": 5}, {"path": "/images/b", "mask_path": "/images/b_masks"}]}}),
    PIPE.case("narrow images", beside={"data.toml": {
        "enable_ar_bucket": True, "min_ar": 0.25, "max_ar": 2.0, "directory": [{"path": "images"}]}}),
    PIPE.case("whole model", {"adapter": REMOVED}, refused="[adapter]"),
    PIPE.case("hunyuan video", {"model/type": "hunyuan-video"}, refused="hunyuan-video"),
]  # fmt: skip
SIMPLE = Usual(
    trainer="SimpleTuner", version="4.x", suffix=".json",
    data={
        "model_type": "lora", "model_family": "flux", "model_flavour": "dev", "lora_type": "standard",
        "lora_rank": 16, "lora_alpha": 16, "base_model_precision": "int8-quanto", "optimizer": "adamw_bf16",
        "learning_rate": 1e-4, "lr_scheduler": "polynomial", "lr_warmup_steps": 100, "max_train_steps": 1000,
        "num_train_epochs": 0, "train_batch_size": 1, "gradient_checkpointing": True, "mixed_precision": "bf16",
        "data_backend_config": "config/backends.json", "resolution": 1024, "resolution_type": "pixel_area",
        "caption_dropout_probability": 0.1, "checkpoint_step_interval": 200, "checkpoints_total_limit": 3,
        "validation_prompt": "a cat", "validation_steps": 100, "validation_guidance": 3.0, "report_to": "none",
        "validation_num_inference_steps": 20, "seed": 42, "output_dir": "output/models", "use_ema": False,
        "grad_clip_method": "norm", "max_grad_norm": 1.0, "vae_batch_size": 1, "push_to_hub": False,
    },
    beside={"backends.json": [
        {"id": "cats", "type": "local", "instance_data_dir": "/images/cats", "caption_strategy": "textfile",
         "repeats": 9, "resolution": 1024, "resolution_type": "pixel_area", "crop": False,
         "cache_dir_vae": "cache/vae", "metadata_backend": "discovery"},
        {"id": "texts", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
    ]},
)  # fmt: skip
BACKENDS = SIMPLE.beside["backends.json"]
SIMPLETUNER = [
    SIMPLE.case("usual"),
    SIMPLE.case("dashes", {**{key: REMOVED for key in SIMPLE.data},
                           **{f"--{key}": value for key, value in SIMPLE.data.items()}}),
    SIMPLE.case("shift by size", {"flow_schedule_auto_shift": True, "flow_schedule_shift": 0}),
    SIMPLE.case("two shifts", {"flow_schedule_auto_shift": True}),
    SIMPLE.case("cosine", {"lr_scheduler": "cosine"}),
    SIMPLE.case("huber", {"loss_type": "huber", "huber_schedule": "constant"}),
    SIMPLE.case("huber above 1", {"loss_type": "smooth_l1", "huber_c": 2.0, "lora_init_type": "gaussian"}),
    SIMPLE.case("uniform", {"flow_use_uniform_schedule": True, "flow_schedule_shift": 1.0}),
    SIMPLE.case("by its defaults", {"lora_rank": REMOVED, "lora_alpha": REMOVED, "learning_rate": REMOVED,
                                    "lr_scheduler": REMOVED, "train_batch_size": REMOVED, "max_grad_norm": REMOVED,
                                    "grad_clip_method": REMOVED, "caption_dropout_probability": REMOVED}),
    SIMPLE.case("sdxl with soft weights", {"model_family": "sdxl", "model_flavour": REMOVED, "snr_gamma": 5,
                                           "use_soft_min_snr": True, "base_model_precision": "no_change"}),
    SIMPLE.case("soap", {"optimizer": "soap"}),
    SIMPLE.case("optimi lion", {"optimizer": "optimi-lion", "learning_rate": 3e-5}),
    SIMPLE.case("prodigy", {"optimizer": "prodigy", "learning_rate": 1.0, "optimizer_config": "d_coef=0.8"}),
    SIMPLE.case("lycoris", {"lora_type": "lycoris", "lycoris_config": "config/lycoris_config.json"},
                beside={"lycoris_config.json": {"algo": "lokr", "multiplier": 1.0, "linear_dim": 10000,
                                                "linear_alpha": 1, "factor": 12}}),
    SIMPLE.case("dora", {"use_dora": True}),
    SIMPLE.case("nf4", {"base_model_precision": "nf4-bnb"}),
    SIMPLE.case("squares", beside={"backends.json": [{**BACKENDS[0], "crop": True, "crop_aspect": "square"}]}),
    SIMPLE.case("megapixels", beside={"backends.json": [{**BACKENDS[0], "resolution": 0.5,
                                                         "resolution_type": "area"}]}),
    SIMPLE.case("regularisation", beside={"backends.json": [
        BACKENDS[0], {"id": "others", "instance_data_dir": "/images/others", "is_regularisation_data": True,
                      "caption_strategy": "textfile"}]}),
    SIMPLE.case("captions by other ways", {"lr_scale": True, "train_batch_size": 3}, beside={"backends.json": [
        {**BACKENDS[0], "caption_strategy": "filename", "prepend_instance_prompt": True, "instance_prompt": "a cat"},
        {"id": "dogs", "instance_data_dir": "/images/dogs", "caption_strategy": "parquet"},
        {"id": "owls", "instance_data_dir": "/images/owls", "caption_strategy": "instanceprompt",
         "instance_prompt": "owl"},
        {"id": "off", "instance_data_dir": "/images/off", "disabled": True}]}),
    SIMPLE.case("tables that say nothing of images", beside={"backends.json": [
        {**BACKENDS[0], "video": {"num_frames": 9}, "huggingface": {"image_column": "image"}}]}),
    SIMPLE.case("control made of the images", beside={"backends.json": [
        {**BACKENDS[0], "conditioning": [{"type": "canny", "captions": False}]}]}, refused="conditioning"),
    SIMPLE.case("videos", beside={"backends.json": [
        {**BACKENDS[0], "dataset_type": "video", "video": {"num_frames": 9}}]}, refused="dataset_type=video"),
    SIMPLE.case("whole model", {"model_type": "full"}, refused="model_type=full"),
    SIMPLE.case("ltx", {"model_family": "ltxvideo"}, refused="ltxvideo"),
]  # fmt: skip
CASES: list[Case] = [
    *SD_FAMILY,
    *ONETRAINER,
    *AI_TOOLKIT,
    *MUSUBI_TUNER,
    *DIFFUSION_PIPE,
    *SIMPLETUNER,
]
