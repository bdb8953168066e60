"""The keys of sd-scripts' training files: the arguments of its network trainers, at 48d368f (v0.10).

Plain rules by argument; what depends on several is marked and read in `sd_scripts`. The GUIs that start
sd-scripts use the same names.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_trainer.importing.rules import TOGETHER, Idle, Lacks, Refused, Rule, To, each, words

_CACHED = Idle("latents and text-encoder outputs are always cached, and never stale")
_STATES = Idle("states for a resume are always saved")
_PROGRAM = Idle("is about that program, not about the result")
_MEMORY = Idle("the plan fits the training into memory; that never changes the result")
_RESUME = Idle("--resume goes on with a run of this program")
_CARD = Idle("the exported file's metadata is made from the run")
_AUGMENTED = Lacks("images are only mirrored")
_NOT_TRAINED = Refused("is of a model that is not trained here")
_BLOCKS = Lacks(
    "ranks and rates of single blocks are adapter.rank_pattern and optimizer.learning_rate_pattern"
)

_MODEL: Mapping[str, Rule] = {
    "pretrained_model_name_or_path": To("base.model"),
    "vae": To("base.vae"),
    "clip_skip": TOGETHER,
    "v2": Idle("the base's files say what it is"),
    "v_parameterization": TOGETHER,
    "zero_terminal_snr": TOGETHER,
    **each("ae clip_l clip_g t5xxl", Lacks(
        "parts of a base beside its file come from base.companion, a diffusers folder or Hub id")),
    "model_type": TOGETHER,
    "tokenizer": Idle("the base's own tokenizer is used"),
    "tokenizer_cache_dir": _PROGRAM,
    "no_half_vae": Idle("the VAE is always computed in a dtype that it bears"),
    **each("disable_mmap_load_safetensors vae_chunk_size vae_disable_cache text_encoder_cpu", _MEMORY),
    "attn_mode": Idle("attention kernels are chosen by the plan"),
    **each("gemma2 gemma2_max_token_length system_prompt byt5 fp8_vl qwen3 llm_adapter_path llm_adapter_lr "
           "self_attn_lr cross_attn_lr mlp_lr mod_lr t5_tokenizer_path qwen3_max_token_length "
           "t5_max_token_length text_encoder qwen_image_vae_2d", _NOT_TRAINED),
    **each("controlnet_model_name_or_path cond_emb_dim", Refused("control nets are not trained here")),
    "sample_batch_size": _PROGRAM,
    **each("use_flash_attn use_sage_attn", Idle("attention kernels are chosen by the plan")),
}  # fmt: skip
_DATA: Mapping[str, Rule] = {
    **each("train_data_dir reg_data_dir prior_loss_weight dataset_config dataset_class in_json "
           "dataset_repeats num_repeats resolution enable_bucket caption_extension caption_extention "
           "shuffle_caption keep_tokens keep_tokens_separator secondary_separator caption_prefix "
           "caption_suffix caption_dropout_rate caption_dropout_every_n_epochs caption_tag_dropout_rate "
           "enable_wildcard flip_aug masked_loss alpha_mask conditioning_data_dir max_token_length "
           "validation_split weighted_captions image_dir class_tokens is_reg metadata_file", TOGETHER),
    "caption_separator": Lacks("tags are parted by commas", off=(",",)),
    **each("color_aug random_crop face_crop_aug_range", _AUGMENTED),
    "random_crop_padding_percent": Lacks("images are only mirrored", off=(0.05,)),
    "min_bucket_reso": TOGETHER,
    "max_bucket_reso": TOGETHER,
    "bucket_no_upscale": Lacks("small images are enlarged to their bucket, and `check` names them"),
    "bucket_reso_steps": Idle("the base says in which steps the sides of buckets go"),
    "resize_interpolation": Lacks("images are always resized with Lanczos", off=("lanczos", "area")),
    "token_warmup_min": TOGETHER,
    "token_warmup_step": Lacks("all tags are there from the first step"),
    "t5xxl_max_token_length": Idle("the base says how long prompts may be"),
    **each("apply_t5_attn_mask apply_lg_attn_mask", Idle("padding is masked as the base was trained")),
    **each("clip_l_dropout_rate clip_g_dropout_rate t5_dropout_rate", Lacks(
        "captions are left out for all text encoders at once: data.caption_dropout")),
    "custom_attributes": Lacks("has no meaning here"),
    **each("debug_dataset cache_info", _PROGRAM),
    **each("cache_latents cache_latents_to_disk cache_text_encoder_outputs vae_batch_size "
           "cache_text_encoder_outputs_to_disk text_encoder_batch_size skip_cache_check", _CACHED),
}  # fmt: skip
_NETWORK: Mapping[str, Rule] = {
    **each("network_module network_args network_dim network_alpha network_dropout network_train_unet_only "
           "text_encoder_lr unet_lr network_train_text_encoder_only", TOGETHER),
    "network_weights": To("train.init_from"),
    "dim_from_weights": Lacks("give adapter.rank, that of the file"),
    "base_weights": Lacks("merge it into the base first: `lora-train merge LORA --into BASE`"),
    "base_weights_multiplier": Lacks("merge it into the base first: `lora-train merge LORA --into BASE`"),
    "network_multiplier": Lacks("the adapter is trained at strength 1", off=(1, 1.0)),
    "scale_weight_norms": TOGETHER,
    "split_mode": _MEMORY,
}  # fmt: skip
_LENGTH: Mapping[str, Rule] = {
    **each("max_train_steps max_train_epochs train_batch_size gradient_accumulation_steps", TOGETHER),
    "seed": To("train.seed"),
    "max_grad_norm": To("train.max_grad_norm", missing=1.0),
    "mixed_precision": TOGETHER,
    **each("full_fp16 full_bf16", Lacks("trained weights are kept in fp32, which is more exact")),
    **each("fp8_base fp8_base_unet fp8_scaled", TOGETHER),
    **each("gradient_checkpointing cpu_offload_checkpointing unsloth_offload_checkpointing blocks_to_swap "
           "double_blocks_to_swap single_blocks_to_swap lowram highvram split_attn mem_eff_attn torch_compile "
           "dynamo_backend dynamo_mode dynamo_fullgraph dynamo_dynamic ddp_timeout deepspeed zero_stage "
           "ddp_gradient_as_bucket_view ddp_static_graph offload_optimizer_device zero3_init_flag "
           "offload_optimizer_nvme_path offload_param_device offload_param_nvme_path mem_eff_save "
           "zero3_save_16bit_model fp16_master_weights_and_gradients fused_backward_pass "
           "blockwise_fused_optimizers fused_optimizer_groups t5xxl_device t5xxl_dtype", _MEMORY),
    "xformers": To("memory.attention", lambda on: "xformers" if on is True else "sdpa"),
    "sdpa": Idle("SDPA is what attention is computed with"),
    **each("max_data_loader_n_workers persistent_data_loader_workers", _PROGRAM),
    **each("initial_epoch initial_step skip_until_initial_step resume resume_from_huggingface", _RESUME),
}  # fmt: skip
_OBJECTIVE: Mapping[str, Rule] = {
    "noise_offset": To("objective.noise_offset"),
    "noise_offset_random_strength": Lacks("the strength is constant"),
    "adaptive_noise_scale": Lacks("noise does not depend on the latents"),
    "multires_noise_iterations": To("objective.multires_noise_iterations"),
    "multires_noise_discount": To("objective.multires_noise_discount"),
    "ip_noise_gamma": To("objective.input_perturbation"),
    "ip_noise_gamma_random_strength": Lacks("the strength is constant"),
    **each("loss_type huber_c huber_schedule huber_scale min_timestep max_timestep", TOGETHER),
    **each("min_snr_gamma debiased_estimation_loss weighting_scheme timestep_sampling sigmoid_scale "
           "discrete_flow_shift training_shift logit_mean logit_std mode_scale guidance_scale "
           "model_prediction_type", TOGETHER),
    "scale_v_pred_loss_like_noise_pred": Lacks("see objective.weighting"),
    "v_pred_like_loss": Lacks("see objective.weighting"),
    "pos_emb_random_crop_rate": Lacks("position embeddings are not moved"),
    "enable_scaled_pos_embed": Lacks("position embeddings are not scaled"),
    "logit_scale": Idle("is not read there either"),
}  # fmt: skip
_OPTIMIZER: Mapping[str, Rule] = {
    **each("optimizer_type use_8bit_adam use_lion_optimizer optimizer_args learning_rate lr_scheduler "
           "lr_scheduler_type lr_scheduler_args lr_warmup_steps lr_scheduler_num_cycles "
           "lr_scheduler_power stop_text_encoder_training", TOGETHER),
    "lr_scheduler_timescale": Lacks("see optimizer.schedule"),
    "lr_scheduler_min_lr_ratio": Lacks("the rate falls to nothing"),
    "lr_decay_steps": Lacks("see optimizer.schedule"),
}  # fmt: skip
_OUTPUT: Mapping[str, Rule] = {
    "output_dir": To("output.folder"),
    "output_name": To("output.name"),
    "save_precision": TOGETHER,
    **each("save_every_n_epochs save_every_n_steps save_last_n_epochs save_last_n_steps", TOGETHER),
    "save_n_epoch_ratio": Lacks("give output.save_every_epochs"),
    **each("save_last_n_epochs_state save_last_n_steps_state save_state save_state_on_train_end "
           "save_state_to_huggingface", _STATES),
    "save_model_as": Lacks("LoRA files are always .safetensors", off=("safetensors",)),
    "use_safetensors": Idle("LoRA files are always .safetensors"),
    **each("save_clip save_t5xxl", Idle("is about whole models")),
    "no_metadata": Lacks("metadata is always written"),
    "training_comment": TOGETHER,
    "metadata_author": To("output.author"),
    "metadata_description": TOGETHER,
    "metadata_license": To("output.license"),
    **each("metadata_title metadata_merged_from metadata_trigger_phrase metadata_preprocessor "
           "metadata_is_negative_embedding", _CARD),
    **each("metadata_tags metadata_usage_hint metadata_thumbnail", Lacks(
        "use `lora-train describe` on the finished file")),
    "huggingface_repo_id": To("output.hub_repo"),
    "huggingface_repo_visibility": To("output.hub_private", lambda asked: asked != "public"),
    **each("huggingface_repo_type huggingface_path_in_repo async_upload", _PROGRAM),
    "huggingface_token": Idle("tokens stay in the environment (HF_TOKEN) or in `hf auth login`"),
    "wandb_api_key": Idle("tokens stay in the environment (WANDB_API_KEY)"),
    "log_with": To("logging.trackers", words(
        {"tensorboard": ["tensorboard"], "wandb": ["wandb"], "all": ["tensorboard", "wandb"]})),
    **each("logging_dir log_prefix log_tracker_name log_tracker_config log_config wandb_run_name "
           "console_log_level console_log_file console_log_simple config_file output_config", _PROGRAM),
}  # fmt: skip
_SAMPLES: Mapping[str, Rule] = {
    "sample_every_n_steps": To("sampling.every_steps"),
    "sample_every_n_epochs": Lacks("give sampling.every_steps"),
    "sample_prompts": TOGETHER,
    "sample_sampler": Idle("samples are drawn with the base's own sampler"),
    "sample_at_first": Idle("the base is always sampled first"),
    "validate_every_n_steps": TOGETHER,
    "validate_every_n_epochs": Lacks("give train.validate_every_steps"),
    "max_validation_steps": Idle("all images that are held out are validated with"),
    "validation_seed": Lacks("images are held out by content and train.seed"),
}
KEYS: Mapping[str, Rule] = {
    **_MODEL, **_DATA, **_NETWORK, **_LENGTH, **_OBJECTIVE, **_OPTIMIZER, **_OUTPUT, **_SAMPLES,
}  # fmt: skip
"""Every argument, by name."""
NETWORK_ARGUMENTS: Mapping[str, Rule] = {
    **each("conv_dim conv_alpha algo preset", TOGETHER),
    **each("rank_dropout module_dropout dropout", TOGETHER),
    "factor": TOGETHER,
    "loraplus_lr_ratio": To("optimizer.lora_plus_ratio"),
    "loraplus_unet_lr_ratio": To("optimizer.lora_plus_ratio"),
    "loraplus_text_encoder_lr_ratio": Lacks("optimizer.lora_plus_ratio is for text encoders too"),
    "dora_wd": To("adapter.dora"),
    "rs_lora": To("adapter.rslora"),
    "train_t5xxl": Lacks("this text encoder is not trained here"),
    **each("block_dims block_alphas conv_block_dims conv_block_alphas down_lr_weight mid_lr_weight "
           "up_lr_weight block_lr_zero_threshold img_attn_dim img_mlp_dim img_mod_dim single_dim "
           "single_mod_dim txt_attn_dim txt_mlp_dim txt_mod_dim in_dims network_reg_dims network_reg_lrs "
           "context_attn_dim context_mlp_dim context_mod_dim x_attn_dim x_mlp_dim x_mod_dim emb_dims "
           "train_blocks train_double_block_indices train_single_block_indices train_block_indices",
           _BLOCKS),
    **each("ggpo_beta ggpo_sigma", Lacks("gradients are not perturbed")),
    **each("constraint constrain rescaled", Lacks("rotations have no bound here")),
    **each("use_tucker use_cp", Lacks("convolutions are factored in two, not in three")),
    **each("use_scalar", Lacks("the update has no factor that is learned")),
    **each("train_norm", Lacks("norms are not trained")),
    "decompose_both": Lacks("LoKr's left factor is whole"),
    "full_matrix": Lacks("LoKr's right factor is of adapter.rank"),
    "rank_dropout_scale": Lacks("what a dropout leaves is scaled as docs/objective.md says"),
    **each("split_qkv", Lacks("a fused projection has one adapter")),
    **each("wd_on_output wd_on_out", Idle("DoRA's norms are those of outputs", )),
    **each("bypass_mode verbose enable_all_linear unit block_size", Idle("says how it is computed")),
    "enable_conv": TOGETHER,
    "train_on_input": Lacks("IA3 has no equivalent"),
    "unbalanced_factorization": Lacks("LoKr's factors are as even as adapter.lokr_factor says"),
}  # fmt: skip
"""What `network_args` may hold: of sd-scripts' own modules and of LyCORIS."""
