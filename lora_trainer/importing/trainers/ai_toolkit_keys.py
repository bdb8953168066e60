"""The keys of ai-toolkit's jobs, at 27a03a9: plain rules by flat key; what depends on several is marked."""

from __future__ import annotations

from collections.abc import Mapping

from lora_trainer.importing.rules import (
    PRECISIONS,
    TOGETHER,
    Idle,
    Lacks,
    Refused,
    Rule,
    To,
    each,
    under,
)

_PROGRAM = Idle("is about that program, not about the result")
_MEMORY = Idle("the plan fits the training into memory; that never changes the result")
_CACHED = Idle("latents and text-encoder outputs are always cached, and never stale")
_SAMPLES = Idle("samples are drawn at the base's own size with its own sampler")
_NOISE = Lacks("noise and latents are used as they are", off=(1, 1.0, "constant"))
_GUIDED = Lacks("the loss is of one plain pass", off=(1, 1.0, 3.0, "constant"))
_VIDEO = Idle("is of videos and sound")

_TRAIN: Mapping[str, Rule] = {
    **each("steps lr unet_lr text_encoder_lr optimizer lr_scheduler batch_size dtype train_text_encoder "
           "min_snr_gamma snr_gamma gradient_accumulation_steps gradient_accumulation loss_type "
           "min_denoising_steps max_denoising_steps timestep_type content_or_style content_or_style_reg "
           "diff_output_preservation diff_output_preservation_multiplier diff_output_preservation_class "
           "disable_sampling ema_config.use_ema ema_config.ema_decay optimizer_params lr_scheduler_params",
           TOGETHER),
    **each("noise_scheduler num_train_timesteps linear_timesteps linear_timesteps2 next_sample_timesteps",
           Idle("the base's own noise schedule is used")),
    **each("refiner_lr embedding_lr adapter_lr train_refiner", Idle("is of what is not trained here")),
    "train_unet": Lacks("the denoiser is always trained", off=(True,)),
    "train_turbo": Lacks("see base.assistant"),
    "show_turbo_outputs": _PROGRAM,
    "noise_offset": To("objective.noise_offset"),
    "max_grad_norm": To("train.max_grad_norm", missing=1.0),
    "reg_weight": To("objective.prior_weight"),
    "prompt_dropout_prob": To("data.caption_dropout", missing=0.0),
    "seed": To("train.seed"),
    **each("xformers sdp attention_backend gradient_checkpointing unload_text_encoder "
           "single_item_batching torch_profiler", _MEMORY),
    "cache_text_embeddings": _CACHED,
    **each("skip_first_sample force_first_sample free_u start_step max_loss_debug", _PROGRAM),
    **each("merge_network_on_save merge_network_on_save_strength", Idle(
        "use `lora-train merge LORA --into BASE`")),
    "max_loss": Lacks("losses are not cut off"),
    **each("learnable_snr_gos weight_jitter noise_multiplier target_noise_multiplier "
           "random_noise_multiplier do_signal_correction_noise signal_correction_noise_scale "
           "do_batch_noise_correction batch_noise_correction_scale do_signal_amplification "
           "signal_amplification_strength random_noise_shift img_multiplier noisy_latent_multiplier "
           "latent_multiplier adaptive_scaling_factor match_noise_norm standardize_images "
           "standardize_latents dynamic_noise_offset optimal_noise_pairing_samples force_consistent_noise "
           "blended_blur_noise do_paramiter_swapping paramiter_swapping_factor", _NOISE),
    **each("do_cfg do_random_cfg cfg_scale max_cfg_scale cfg_rescale correct_pred_norm "
           "correct_pred_norm_multiplier t0_loss_target t0_velocity_equiv_weight do_fft_loss "
           "do_fft_velocity_equiv_weight pred_scaler prompt_saturation_chance do_prior_divergence "
           "target_norm_std target_norm_std_value latent_feature_extractor_path latent_feature_loss_weight "
           "diffusion_feature_extractor_path diffusion_feature_extractor_weight do_guidance_loss "
           "guidance_loss_target do_guidance_loss_cfg_zero guidance_loss_schedule unconditional_prompt "
           "do_differential_guidance differential_guidance_scale do_blank_stabilization "
           "blank_prompt_preservation blank_prompt_preservation_multiplier inverted_mask_prior "
           "inverted_mask_prior_multiplier match_adapter_assist match_adapter_chance loss_target "
           "negative_prompt max_negative_prompts short_and_long_captions "
           "short_and_long_captions_encoder_split adapter_assist_name_or_path adapter_assist_type", Lacks(
               _GUIDED.why, off=(1, 1.0, 3.0, 0.5, "constant", "t2i", "noise"))),
    "bypass_guidance_embedding": Lacks("give objective.guidance_scale: it is told 1 otherwise"),
    **each("audio_loss_multiplier switch_boundary_every", _VIDEO),
    **each("ema_config.use_feedback ema_config.param_multiplier", Lacks("the average is a plain one", off=(1.0,))),
    **each("validation_config validation_config.resolution validation_config.validate_every_n_steps "
           "validation_config.validation_sigmas validation_config.validation_items", Lacks(
               "give data.validation_fraction, a share of the images that is held out")),
    "reg_prompt_dropout_prob": Idle("data.caption_dropout is for all"),
}  # fmt: skip
_MODEL: Mapping[str, Rule] = {
    "name_or_path": To("base.model"),
    "vae_path": To("base.vae"),
    "assistant_lora_path": To("base.assistant"),
    "extras_name_or_path": To("base.companion"),
    **each("arch quantize qtype is_v2 is_xl is_v3 is_flux is_v_pred is_pixart is_pixart_sigma is_auraflow "
           "is_lumina2 is_ssd is_vega", TOGETHER),
    "lora_path": Lacks("merge it into the base first: `lora-train merge LORA --into BASE`"),
    **each("inference_lora_path unconditional_lora_path", _SAMPLES),
    "accuracy_recovery_adapter": Lacks("a quantized base has no such adapter beside it"),
    **each("refiner_name_or_path refiner_start_at latent_space_version experimental_xl unet_path "
           "unet_sample_size te_name_or_path", Lacks("the base is loaded as it is", off=(0.5,))),
    **each("use_text_encoder_1 use_text_encoder_2 use_flux_cfg", Lacks(
        "all text encoders are used", off=(True,))),
    **each("dtype vae_dtype te_dtype vae_device te_device quantize_te qtype_te text_encoder_bits low_vram "
           "auto_memory layer_offloading layer_offloading_transformer_percent quantize_kwargs "
           "layer_offloading_text_encoder_percent split_model_over_gpus compile block_compile compile_mode "
           "split_model_other_module_param_count_scale compile_fullgraph compile_dynamic "
           "cache_size_limit quantize_kwargs.exclude", _MEMORY),
    "attn_masking": Idle("padding is masked as the base was trained"),
    **each("ignore_if_contains only_if_contains", Lacks("choose adapter.targets")),
    **each("model_kwargs model_paths", Lacks("the base is loaded as it is")),
    "model_kwargs.match_target_res": Lacks("is of editing models"),
    "in_context": Refused("control images are not trained here"),
}  # fmt: skip
_NETWORK: Mapping[str, Rule] = {
    **each("type rank linear conv alpha linear_alpha conv_alpha dropout lokr_full_rank lokr_factor "
           "network_kwargs.only_if_contains network_kwargs.ignore_if_contains", TOGETHER),
    "network_kwargs": Idle("is empty: nothing is chosen in it"),
    "transformer_only": Idle("adapter.targets says which layers there are"),
    "pretrained_lora_path": To("train.init_from"),
    **each("old_lokr_format split_multistage_loras", Idle("LoRA files are written as most programs read them")),
    "layer_offloading": _MEMORY,
    "all_layers": Lacks("norms and other layers are not trained"),
    **each("lorm.extract_mode lorm.do_conv lorm.extract_mode_param lorm.parameter_threshold", Lacks(
        "a LoRA of the base as it is")),
}  # fmt: skip
_DATASET: Mapping[str, Rule] = {
    **each("folder_path dataset_path resolution buckets caption_ext num_repeats flip_x caption_dropout_rate "
           "shuffle_tokens token_dropout_rate trigger_word keep_tokens is_reg prior_reg alpha_mask "
           "mask_path mask_min_value loss_multiplier", TOGETHER),
    "flip_y": Lacks("images are mirrored left to right only"),
    **each("random_scale random_crop square_crop augments augmentations shuffle_augmentations "
           "standardize_images", Lacks("images are only mirrored")),
    "scale": Lacks("images are resized to their bucket", off=(1, 1.0)),
    "bucket_tolerance": Idle("the base says in which steps the sides of buckets go"),
    "network_weight": Lacks("the adapter is trained at strength 1", off=(1, 1.0)),
    "default_caption": Lacks("name the folder N_WORDS for a text where there is no caption"),
    **each("random_triggers replacements", Lacks("write {a|b} in captions, with data.wildcards")),
    "random_triggers_max": Idle("is of random_triggers"),
    "use_short_captions": Lacks("there is one text for an image"),
    "caption_type": TOGETHER,
    "invert_mask": Lacks("invert the masks: white counts"),
    "poi": Lacks("images are cropped at their middle"),
    **each("diff_output_preservation diff_output_preservation_class", Lacks(
        "data.class_word is for all folders")),
    **each("control_path control_path_1 control_path_2 control_path_3 inpaint_path clip_image_path "
           "unconditional_path control_from_same_folder clip_image_from_same_folder controls", Refused(
               "control images are not trained here")),
    **each("num_controls_from_same_folder control_transparent_color full_size_control_images "
           "clip_image_augmentations clip_image_shuffle_augmentations replay_transforms guidance_type "
           "extra_values", Idle("is of control images")),
    **each("cache_latents cache_latents_to_disk cache_tensors_to_disk cache_clip_vision_to_disk "
           "cache_text_embeddings load_image_when_caching_latents cache_latents_num_workers", _CACHED),
    **each("num_workers prefetch_factor debug fast_image_size type", _PROGRAM),
    "batch_size": Lacks("train.batch_size is for all folders"),
    **each("num_frames shrink_video_to_frames fps auto_frame_count trim_auto_frame_count_tail do_i2v "
           "do_audio audio_preserve_pitch audio_normalize", _VIDEO),
}  # fmt: skip
KEYS: Mapping[str, Rule] = {
    **each("job meta meta.name meta.version device performance_log_every sqlite_db_path", _PROGRAM),
    "config.name": To("output.name"),
    "training_folder": To("output.folder"),
    **each("type trigger_word datasets", TOGETHER),
    **under("network.", _NETWORK),
    **each("embedding decorator adapter first_sample guidance slider do_lorm lorm_extract_mode "
           "lorm_extract_mode_param torch_profiler", Lacks("only the network is trained")),
    **under("save.", {
        "save_every": TOGETHER,
        "dtype": To("output.precision", PRECISIONS, missing="float16"),
        "max_step_saves_to_keep": To("output.keep_last"),
        "save_format": Idle("LoRA files are always .safetensors"),
        **each("push_to_hub hf_repo_id hf_private", TOGETHER),
    }),
    **under("datasets[].", _DATASET),
    **under("train.", _TRAIN),
    **under("model.", _MODEL),
    **under("logging.", each("log_every verbose use_ui_logger project_name run_name", _PROGRAM)),
    "logging.use_wandb": To("logging.trackers", lambda on: ["wandb"] if on else ["tensorboard"]),
    **under("sample.", {
        **each("sample_every prompts samples", TOGETHER),
        "neg": To("sampling.negative_prompt", lambda text: text if isinstance(text, str) else ""),
        "seed": To("sampling.seed"),
        "guidance_scale": To("sampling.guidance_scale"),
        "sample_steps": To("sampling.steps"),
        **each("sampler width height walk_seed sample_start_step network_multiplier guidance_rescale format "
               "adapter_conditioning_scale refiner_start_at extra_values num_frames fps do_cfg_norm ctrl_img",
               _SAMPLES),
    }),
}  # fmt: skip
"""Every key of a job's process, `datasets[]` standing for each of a list."""
ARCHITECTURES: Mapping[str, tuple[bool, bool]] = {
    **dict.fromkeys(("sd1", "sd2", "sdxl"), (False, True)),
    **dict.fromkeys(("sd3", "flux", "flux2", "flux2_klein_4b", "flux2_klein_9b", "chroma", "qwen_image",
                     "zimage"), (True, False)),
}  # fmt: skip
"""Models that are trained here: by flow matching or not, and whether their text encoders can be."""
OLD_FLAGS: Mapping[str, str] = {
    "model.is_v2": "sd2",
    "model.is_xl": "sdxl",
    "model.is_v3": "sd3",
    "model.is_flux": "flux",
    "model.is_pixart": "pixart",
    "model.is_pixart_sigma": "pixart_sigma",
    "model.is_auraflow": "auraflow",
    "model.is_lumina2": "lumina2",
    "model.is_ssd": "ssd",
    "model.is_vega": "vega",
}
"""How older jobs name the model."""
BITS: Mapping[str, str] = {
    "qfloat8": "fp8", "float8": "fp8", "qint8": "int8", "int8": "int8", "nf4": "nf4", "qint4": "nf4",
    "qint2": "nf4", "uint4": "nf4", "uint3": "nf4", "uint2": "nf4", "int4": "nf4", "uint8": "int8",
    "uint6": "int8", "uint7": "int8", "uint5": "nf4",
}  # fmt: skip
"""How a quantized base is kept."""
