class LoRARequest:
    lora_name: str
    lora_path: str
