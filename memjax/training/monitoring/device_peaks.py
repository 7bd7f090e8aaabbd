"""Peak FLOP/s of known devices, and memory in use."""

import jax

#: Floating-point operations a second, dense bfloat16 products with float32 sums, by
#: `device_kind`. From the makers' data sheets.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
GIB = 2**30


def peak_flops() -> float | None:
    """Peak FLOP/s of all devices of the run; None if unknown."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return peak and peak * jax.device_count()


def memory_in_use() -> dict[str, float]:
    """GiB in use now and at most so far, of this host's fullest device.

    Empty where a device does not count them, as the CPU.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    names = {"hbm_gib": "bytes_in_use", "hbm_peak_gib": "peak_bytes_in_use"}
    return {
        said: max(s[name] for s in stats) / GIB
        for said, name in names.items()
        if all(name in s for s in stats)
    }
