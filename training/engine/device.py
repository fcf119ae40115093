"""What the device could do at best: the yardstick of MFU (model FLOPs utilisation)."""

import torch

# Dense bf16 matrix FLOP/s without sparsity, from the makers' data sheets. First match wins: longer
# names first.
PEAK_BF16_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 4080": 97.5e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # one of its two dies, which is what PyTorch calls a device
}
# Parts of names that mean less than the whole device: laptop chips, cut-down chips, MIG slices.
SMALLER_RELATIVES = ("Laptop", "D", "MIG")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads per process"


def peak_flops(name: str) -> float | None:
    """Peak of the named device, None if the table does not have it."""
    words = f" {name} ".replace("-", " ")
    if any(f" {part} " in words for part in SMALLER_RELATIVES):
        return None
    return next(
        (peak for key, peak in PEAK_BF16_FLOPS.items() if f" {key} " in words),
        None,
    )


def mfu(
    tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int
) -> float | None:
    """Share of the devices' peak that model FLOPs use, None where the peak is unknown."""
    return None if peak is None else tokens_per_second * flops_per_token / (peak * devices)
