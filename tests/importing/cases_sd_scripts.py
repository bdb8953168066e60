"""Cases of sd-scripts and the two programs that save its arguments: kohya_ss and LoRA_Easy_Training_Scripts."""

from __future__ import annotations

from tests.importing.corpus import REMOVED, Case, Usual, changed

SDXL = Usual(
    trainer="sd-scripts", version="0.9.1", suffix=".toml",
    data={
        "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
        "train_data_dir": "images", "output_dir": "out", "output_name": "cat",
        "network_module": "networks.lora", "network_dim": 16, "network_alpha": 8,
        "unet_lr": 2e-4, "text_encoder_lr": 5e-5, "learning_rate": 1e-4,
        "optimizer_type": "AdamW8bit", "lr_scheduler": "cosine", "lr_warmup_steps": 100,
        "max_train_steps": 2000, "train_batch_size": 2, "resolution": "1024,1024",
        "enable_bucket": True, "min_bucket_reso": 512, "max_bucket_reso": 2048,
        "mixed_precision": "bf16", "save_precision": "fp16", "save_every_n_steps": 500,
        "min_snr_gamma": 5, "noise_offset": 0.05, "seed": 7, "cache_latents": True,
        "gradient_checkpointing": True, "caption_extension": ".txt", "shuffle_caption": True,
        "keep_tokens": 1, "max_token_length": 225, "xformers": True,
    },
)  # fmt: skip
FLUX = Usual(
    trainer="sd-scripts", version="48d368f", suffix=".toml",
    data={
        "model": {"pretrained_model_name_or_path": "flux1-dev.safetensors", "ae": "ae.sft",
                  "clip_l": "clip_l.safetensors", "t5xxl": "t5.safetensors"},
        "network": {"network_module": "networks.lora_flux", "network_dim": 16, "network_alpha": 16,
                    "network_train_unet_only": True},
        "training": {"learning_rate": 1e-4, "optimizer_type": "AdamW", "max_train_steps": 1000,
                     "timestep_sampling": "flux_shift", "model_prediction_type": "raw",
                     "guidance_scale": 1.0, "mixed_precision": "bf16", "fp8_base": True,
                     "blocks_to_swap": 18, "cache_text_encoder_outputs": True},
        "dataset": {"train_data_dir": "images", "resolution": 768, "enable_bucket": True},
    },
)  # fmt: skip
SUBSETS = Usual(
    trainer="sd-scripts", version="0.8.7", suffix=".toml",
    data={
        "general": {"caption_extension": ".txt", "shuffle_caption": True, "keep_tokens": 2},
        "datasets": [{
            "resolution": 768, "batch_size": 4, "enable_bucket": True,
            "subsets": [{"image_dir": "set/10_cat", "num_repeats": 3},
                        {"image_dir": "set/dogs", "flip_aug": True}],
        }],
    },
)  # fmt: skip


def _optimizer(name: str) -> Case:
    """Return a case with another optimizer at a rate of 1."""
    changes = {"optimizer_type": name, "unet_lr": 1.0, "text_encoder_lr": 1.0}
    return SDXL.case(f"optimizer {name}", changes)


SD_SCRIPTS = [
    SDXL.case("usual"),
    _optimizer("DAdaptAdam"),
    _optimizer("DAdaptLion"),
    _optimizer("prodigyplus.ProdigyPlusScheduleFree"),
    SDXL.case("prodigy", {"optimizer_type": "Prodigy", "unet_lr": 1.0, "text_encoder_lr": 1.0,
                          "optimizer_args": ["decouple=True", "d_coef=2", "weight_decay=0.01"]}),
    SDXL.case("adafactor with its own rate", {"optimizer_type": "Adafactor", "unet_lr": 1e-3}),
    SDXL.case("adafactor at a fixed rate", {"optimizer_type": "Adafactor", "optimizer_args": [
        "relative_step=False", "scale_parameter=False", "warmup_init=False"]}),
    SDXL.case("sgd", {"optimizer_type": "SGDNesterov", "unet_lr": 0.5}),
    SDXL.case("lion", {"optimizer_type": "Lion", "optimizer_args": ["weight_decay=0.1", "betas=0.9,0.95"]}),
    SDXL.case("restarts", {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 4}),
    SDXL.case("locon", {"network_module": "lycoris.kohya", "network_args": [
        "algo=locon", "conv_dim=4", "conv_alpha=2", "preset=full"]}),
    SDXL.case("loha", {"network_module": "lycoris.kohya", "network_args": ["algo=loha"]}),
    SDXL.case("lokr of whole matrices", {"network_module": "lycoris.kohya", "network_dim": 100000,
                                         "network_args": ["algo=lokr", "factor=8"]}),
    SDXL.case("windows paths", {"train_data_dir": "C:\\data\\cat", "output_dir": "D:\\out"}),
    SDXL.case("fixed words", {"caption_prefix": "1girl, solo |||", "keep_tokens_separator": "|||",
                              "keep_tokens": REMOVED}),
    SDXL.case("sizes between steps", {"resolution": "512,650"}),
    SDXL.case("its defaults", {"network_dim": REMOVED, "network_alpha": REMOVED, "min_snr_gamma": REMOVED,
                               "lr_scheduler": REMOVED, "max_train_steps": REMOVED, "unet_lr": REMOVED,
                               "learning_rate": REMOVED, "train_batch_size": REMOVED}),
    SDXL.case("part of the noise", {"min_timestep": 100, "max_timestep": 900}),
    SDXL.case("huber by snr", {"loss_type": "huber", "huber_c": 0.2, "huber_scale": 3.0, "min_snr_gamma": REMOVED}),
    SDXL.case("huber by steps", {"loss_type": "huber", "huber_c": 0.2, "huber_schedule": "exponential"}),
    SDXL.case("smooth l1", {"loss_type": "smooth_l1", "huber_c": 0.2, "huber_scale": 2.0,
                            "huber_schedule": "constant"}),
    SDXL.case("l1", {"loss_type": "l1"}),
    SDXL.case("debiased", {"debiased_estimation_loss": True, "min_snr_gamma": REMOVED}),
    SDXL.case("linear", {"lr_scheduler": "linear"}),
    SDXL.case("polynomial", {"lr_scheduler": "polynomial", "lr_scheduler_power": 2}),
    SDXL.case("squares", {"enable_bucket": False}),
    SDXL.case("accumulated", {"gradient_accumulation_steps": 4}),
    SDXL.case("one rate", {"unet_lr": REMOVED, "text_encoder_lr": REMOVED}),
    SDXL.case("convolutions of lora", {"network_args": ["conv_dim=8", "conv_alpha=1"]}),
    FLUX.case("flux of some noise", {"training/min_timestep": 200}),
    FLUX.case("flux by mode", {"training/timestep_sampling": "sigma", "training/weighting_scheme": "mode"}),
    FLUX.case("flux"),
    FLUX.case("flux by its defaults", {"training/timestep_sampling": REMOVED,
                                       "training/model_prediction_type": REMOVED,
                                       "training/guidance_scale": REMOVED}),
    FLUX.case("flux shifted", {"training/timestep_sampling": "shift", "training/discrete_flow_shift": 3.1582}),
    FLUX.case("flux sigmoid", {"training/timestep_sampling": "sigmoid"}),
    FLUX.case("flux logit normal", {"training/timestep_sampling": "sigma", "training/logit_mean": 0.5,
                                    "training/weighting_scheme": "logit_normal"}),
    FLUX.case("flux with snr weights", {"training/min_snr_gamma": 5}),
    FLUX.case("lumina", {"network/network_module": "networks.lora_lumina"}, refused="lora_lumina"),
    SUBSETS.case("subsets"),
    SUBSETS.case("keys above all tables", {"datasets/0/resolution": REMOVED, "resolution": [768, 768],
                                           "datasets/0/enable_bucket": REMOVED, "enable_bucket": True}),
    SDXL.case("a control net", {"cond_emb_dim": 32}, refused="cond_emb_dim"),
    SUBSETS.case("a subset to validate with", {"datasets/0/subsets/1/validation_split": 1.0}),
    SUBSETS.case("folders that lie apart", {"datasets/0/subsets/1/image_dir": "/elsewhere/dogs"}),
]  # fmt: skip
GUI = Usual(
    trainer="kohya_ss", version="25.2.1", suffix=".json",
    data={
        "LoRA_type": "Standard", "pretrained_model_name_or_path": "base.safetensors", "sdxl": True,
        "additional_parameters": "", "bucket_no_upscale": False, "bucket_reso_steps": 64,
        "cache_latents": True, "caption_extension": ".txt", "clip_skip": 1, "color_aug": False,
        "conv_alpha": 1, "conv_dim": 1, "enable_bucket": True, "epoch": 10, "flip_aug": False,
        "fp8_base": False, "gradient_accumulation_steps": 1, "gradient_checkpointing": True,
        "keep_tokens": 0, "learning_rate": 1e-4, "loss_type": "l2", "lr_scheduler": "cosine",
        "lr_warmup": 10, "max_bucket_reso": 2048, "max_data_loader_n_workers": 0, "max_grad_norm": 1,
        "max_resolution": "1024,1024", "max_timestep": 1000, "max_token_length": 75,
        "max_train_epochs": 0, "max_train_steps": 1500, "min_bucket_reso": 256, "min_snr_gamma": 0,
        "min_timestep": 0, "mixed_precision": "bf16", "network_alpha": 8, "network_dim": 16,
        "network_dropout": 0, "noise_offset": 0, "noise_offset_type": "Original",
        "num_cpu_threads_per_process": 2, "optimizer": "AdamW8bit", "optimizer_args": "",
        "output_dir": "out", "output_name": "cat", "prior_loss_weight": 1, "reg_data_dir": "",
        "sample_prompts": "", "save_every_n_epochs": 1, "save_every_n_steps": 0,
        "save_precision": "fp16", "scale_weight_norms": 0, "sdxl_no_half_vae": True, "seed": 42,
        "shuffle_caption": False, "text_encoder_lr": 5e-5, "train_batch_size": 2,
        "train_data_dir": "images", "unet_lr": 1e-4, "v2": False, "v_parameterization": False,
        "vae": "", "xformers": "xformers", "LyCORIS_preset": "full", "factor": -1, "dora_wd": False,
        "flux1_checkbox": False, "ae": "", "timestep_sampling": "sigma", "guidance_scale": 3.5,
        "discrete_flow_shift": 3,
    },
)  # fmt: skip
GUI_FLUX = {
    "LoRA_type": "Flux1", "flux1_checkbox": True, "sdxl": False, "ae": "ae.sft", "clip_l": "clip_l.sft",
    "t5xxl": "t5.sft", "timestep_sampling": "sigmoid", "guidance_scale": 1, "min_snr_gamma": 7,
    "model_prediction_type": "raw", "flux1_cache_text_encoder_outputs": True, "text_encoder_lr": 0,
}  # fmt: skip
KOHYA_SS = [
    GUI.case("usual"),
    GUI.case("flux with the stock preset's gamma", GUI_FLUX),
    GUI.case("flux that trains clip", {**GUI_FLUX, "text_encoder_lr": 5e-5,
                                       "flux1_cache_text_encoder_outputs": False}),
    GUI.case("only the unet", {"text_encoder_lr": 0}),
    GUI.case("locon", {"LoRA_type": "LyCORIS/LoCon", "conv_dim": 8, "conv_alpha": 4}),
    GUI.case("dora", {"LoRA_type": "LyCORIS/LoCon", "dora_wd": True, "conv_dim": 0}),
    GUI.case("lokr", {"LoRA_type": "LyCORIS/LoKr", "factor": 6, "conv_dim": 0}),
    GUI.case("diag oft", {"LoRA_type": "LyCORIS/Diag-OFT", "conv_dim": 0}),
    GUI.case("ia3", {"LoRA_type": "LyCORIS/iA3", "conv_dim": 0}),
    GUI.case("dreambooth tab", {"LoRA_type": REMOVED}, refused="there is no LoRA_type"),
    GUI.case("more words", {"additional_parameters": "--min_snr_gamma=5 --debiased_estimation_loss"}),
    GUI.case("multires noise", {"noise_offset_type": "Multires", "noise_offset": 0.05,
                                "multires_noise_iterations": 6, "multires_noise_discount": 0.3}),
    GUI.case("prompts of its own", {"sample_prompts": "a cat --w 512 --h 512\n# no\na dog --n ugly"}),
    GUI.case("prodigy", {"optimizer": "Prodigy", "unet_lr": 1, "text_encoder_lr": 1, "lr_warmup": 0,
                         "optimizer_args": '"d_coef=1.5" "decouple=True"'}),
    GUI.case("hunyuan image", {"hunyuan_image_checkbox": True}, refused="hunyuan_image_checkbox"),
]  # fmt: skip
EASY = Usual(
    trainer="LoRA_Easy_Training_Scripts", version="ae5ce07", suffix=".toml",
    data={
        "subsets": [{"name": "subset 1", "image_dir": "F:/data/10_cat", "num_repeats": 10,
                     "shuffle_caption": True, "keep_tokens": 1, "caption_extension": ".txt"}],
        "train_mode": {"train_mode": "lora"},
        "general_args": {
            "args": {"pretrained_model_name_or_path": "F:/base.safetensors", "sdxl": True, "seed": 23,
                     "mixed_precision": "bf16", "max_train_steps": 1000, "max_token_length": 225,
                     "gradient_checkpointing": True, "xformers": True, "cache_latents": True},
            "dataset": {"resolution": 1024, "batch_size": 2}},
        "network_args": {"args": {"network_dim": 16, "network_alpha": 8.0, "min_timestep": 0,
                                  "max_timestep": 1000, "network_train_unet_only": True}},
        "optimizer_args": {"args": {
            "optimizer_type": "AdamW8bit", "lr_scheduler": "cosine", "learning_rate": 1e-4,
            "warmup_ratio": 0.1, "min_snr_gamma": 8, "loss_type": "l2",
            "optimizer_args": {"weight_decay": "0.1", "betas": "0.9,0.99"}}},
        "saving_args": {"args": {"output_dir": "F:/out", "output_name": "cat", "save_precision": "fp16",
                                 "save_model_as": "safetensors", "save_every_n_epochs": 1}},
        "noise_args": {"args": {"noise_offset": 0.03}},
        "bucket_args": {"dataset": {"enable_bucket": True, "min_bucket_reso": 256,
                                    "max_bucket_reso": 2048, "bucket_reso_steps": 64}},
    },
)  # fmt: skip
OPTIMIZER, NETWORK = "optimizer_args/args", "network_args/args"
LORA_EASY = [
    EASY.case("usual"),
    EASY.case("came with a rex schedule", {
        f"{OPTIMIZER}/optimizer_type": "LoraEasyCustomOptimizer.came.CAME",
        f"{OPTIMIZER}/lr_scheduler_type": "LoraEasyCustomOptimizer.RexAnnealingWarmRestarts.RexAnnealingWarmRestarts",
    }),
    EASY.case("an optimizer of its own", {f"{OPTIMIZER}/optimizer_type": "LoraEasyCustomOptimizer.compass.Compass"}),
    EASY.case("locon", {f"{NETWORK}/network_args": {"algo": "locon", "conv_dim": 8, "conv_alpha": 4.0}}),
    EASY.case("dora", {f"{NETWORK}/network_args": {"algo": "locon", "dora_wd": True}}),
    EASY.case("two subsets", {"subsets": [
        {"image_dir": "F:/data/cat", "num_repeats": 2}, {"image_dir": "F:/data/others", "is_reg": True}]}),
    EASY.case("prodigy", {f"{OPTIMIZER}/optimizer_type": "Prodigy", f"{OPTIMIZER}/learning_rate": 1.0}),
    EASY.case("text encoder", {f"{NETWORK}/network_train_unet_only": REMOVED,
                               f"{OPTIMIZER}/unet_lr": 2e-4, f"{OPTIMIZER}/text_encoder_lr": 3e-5}),
    EASY.case("v prediction", {"general_args/args/v_parameterization": True, "noise_args/args": {},
                               "general_args/args/zero_terminal_snr": True}),
    EASY.case("flux", {"flux_args": {"args": {
        "ae": "ae.sft", "clip_l": "c.sft", "t5xxl": "t.sft", "timestep_sampling": "shift",
        "discrete_flow_shift": 3.1, "model_prediction_type": "raw", "guidance_scale": 1.0}}}),
    EASY.case("textual inversion", {"train_mode/train_mode": "textual_inversion"}, refused="train_mode"),
    EASY.case("loss and norm", {f"{OPTIMIZER}/loss_type": "huber", f"{OPTIMIZER}/huber_c": 0.2,
                                f"{OPTIMIZER}/huber_schedule": "exponential", f"{OPTIMIZER}/max_grad_norm": 0.5}),
    EASY.case("half of the timesteps", {f"{NETWORK}/min_timestep": 100, f"{NETWORK}/max_timestep": 900}),
    EASY.case("batches put together", {"general_args/args/gradient_accumulation_steps": 4}),
]  # fmt: skip
CASES = [*SD_SCRIPTS, *KOHYA_SS, *LORA_EASY]
SECTIONS = Usual(
    trainer="sd-scripts", version="sections", suffix=".toml",
    data={
        "model_arguments": {"pretrained_model_name_or_path": "someone/base", "v2": False, "v_parameterization": False},
        "training": {
            "train_data_dir": "images", "output_dir": "out", "output_name": "zibbo", "network_module": "lycoris.kohya",
            "network_dim": 16, "network_alpha": 8, "learning_rate": 1e-4, "unet_lr": 2e-4, "text_encoder_lr": 5e-5,
            "network_args": ["algo=locon", "conv_dim=4", "conv_alpha=2", "preset=full"],
            "optimizer_type": "AdamW8bit", "optimizer_args": ["weight_decay=0.1", "betas=(0.9, 0.99)", "odd=1"],
            "lr_scheduler": "cosine", "lr_warmup_steps": 100, "max_train_epochs": 10, "train_batch_size": 2,
            "gradient_accumulation_steps": 2, "min_snr_gamma": 5, "noise_offset": 0.05, "seed": 7,
            "resolution": "512,768", "enable_bucket": True, "max_bucket_reso": 1024, "mixed_precision": "bf16",
            "save_precision": "fp16", "save_every_n_epochs": 2, "save_last_n_epochs": 6, "shuffle_caption": True,
            "keep_tokens": 2, "caption_extension": ".txt", "caption_dropout_rate": 0.1, "flip_aug": False,
            "max_token_length": 75, "clip_skip": 2, "cache_latents": True, "xformers": True, "loss_type": "smooth_l1",
            "max_timestep": 1000, "color_aug": False, "some_new_option": 3,
            "huggingface_token": "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"},
    },
)  # fmt: skip
TABLES = Usual(
    trainer="sd-scripts", version="tables", suffix=".toml",
    data={
        "general": {"shuffle_caption": True, "keep_tokens_separator": "|||", "caption_extension": ".txt",
                    "enable_bucket": True},
        "datasets": [{"resolution": 512, "batch_size": 4, "bucket_no_upscale": True, "subsets": [
            {"image_dir": "/data/cat/10_zibbo", "num_repeats": 3, "caption_prefix": "photo of"},
            {"image_dir": "/data/cat/others", "shuffle_caption": False, "class_tokens": "a cat", "flip_aug": True,
             "caption_tag_dropout_rate": 0.1, "odd": 1}]}],
    },
)  # fmt: skip
FEW = Usual(trainer="sd-scripts", version="few", suffix=".toml", data={"network_dim": 4})
ODD_FILES = [
    SECTIONS.case("training"),
    TABLES.case("dataset"),
    TABLES.case("one subset", {"datasets/0/subsets": [{"image_dir": "/data/10_cat", "flip_aug": True}]}),
    TABLES.case("several resolutions", {"datasets": [
        {"resolution": side, "batch_size": 2, "subsets": [{"image_dir": f"/data/{folder}"}]}
        for side, folder in ((1024, "cat"), (768, "cat"), (512, "dog"))]}),
    TABLES.case("regularisation and masks", {"datasets/0/subsets": [
        {"image_dir": "/data/cat/own", "alpha_mask": True}, {"image_dir": "/data/cat/others", "is_reg": True}]}),
    TABLES.case("images beside a folder", {"datasets/0/subsets": [
        {"image_dir": "/data/cat/more", "num_repeats": 2}, {"image_dir": "/data/cat", "num_repeats": 5}]}),
    FEW.case("options"),
    FEW.case("masks", {"reg_data_dir": "/others", "prior_loss_weight": 0.5, "masked_loss": True}),
    FEW.case("off", {"reg_data_dir": "", "prior_loss_weight": 0.0, "masked_loss": False, "seed": 1}),
    FEW.case("dataset file", {"dataset_config": "data.toml", "max_train_epochs": 2, "network_train_unet_only": True},
             beside={"data.toml": changed(TABLES.data, {"datasets/0/subsets": [
                 {"image_dir": "images", "num_repeats": 3, "odd": 1}]})}),
    FEW.case("oft with dropout", {"network_module": "lycoris.kohya", "network_args": ["algo=diag-oft"],
                                  "network_dropout": 0.1}),
    FEW.case("two dropouts", {"network_args": ["algo=lora", "dropout=0.1"], "network_dropout": 0.25}),
    FEW.case("prodigy at half", {"optimizer_type": "Prodigy", "unet_lr": 0.5}),
    FEW.case("saved at the end", {"max_train_steps": 100, "save_every_n_steps": 100}),
    FEW.case("saved after the end", {"max_train_steps": 100, "save_every_n_steps": 101}),
    FEW.case("lost dataset file", {"dataset_config": "gone.toml", "max_train_epochs": 2}),
    *(FEW.case(f"optimizer {name}", {"optimizer_type": name}) for name in (
        "bitsandbytes.optim.AdEMAMix8bit", "SCHEDULE_FREE_ADAMW", "RAdamScheduleFree", "bnb-lion8bit-paged")),
    FEW.case("validation and rates", {
        "validation_split": 0.2, "validate_every_n_steps": 50, "text_encoder_lr": [1e-5, 2e-5],
        "stop_text_encoder_training": 400, "weighted_captions": True}),
    TABLES.case("no folder", {"datasets/0/subsets": [{"num_repeats": 2}]}, refused="names no folder of images"),
    TABLES.case("no subset", {"datasets": [{"resolution": 512}]}, refused="names no subset"),
    TABLES.case("no table", {"general": 3}, refused="is no table"),
    FEW.case("another model", {"gemma2": "g", "network_module": "networks.lora"}, refused="is of a model that is not"),
]  # fmt: skip
"""Files with odd or unknown keys, which the trainers' own code would refuse."""
