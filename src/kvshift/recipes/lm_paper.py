"""The paper's validation losses of Tables 6 to 13 and 15, as printed."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LENGTHS", "LOSSES", "MLA_RATE", "RATES"]

RATES = (1e-4, 2e-4, 4e-4, 1e-3, 2e-3, 4e-3)
LENGTHS = (256, 512, 1024, 2048, 4096)
MLA_RATE = 2e-3
"""Of Table 15, which has no other."""

_OOM = None  # out of memory

# By variant: a line for each learning rate, a column for each context length.
_PRINTED: Mapping[str, tuple[tuple[float | None, ...], ...]] = {
    "vanilla": (  # Table 6
        (3.7908, 3.7078, 3.6786, 3.6758, 3.6845),
        (3.6454, 3.5839, 3.5400, 3.5308, 3.5347),
        (3.5440, 3.4558, 3.4133, 3.3778, 3.3880),
        (3.4701, 3.3816, 3.3244, 3.3082, 3.2877),
        (3.4505, 3.3605, 3.3080, 3.2813, 3.2627),
        (3.4632, 3.3701, 3.3373, 3.5104, 3.2983),
    ),
    "kv-shift": (  # Table 7
        (3.7689, 3.6968, 3.6491, 3.6402, 3.6441),
        (3.6272, 3.5616, 3.5153, 3.4975, 3.4929),
        (3.5308, 3.4440, 3.3903, 3.3686, 3.3692),
        (3.4603, 3.3691, 3.3166, 3.2838, 3.2770),
        (3.4381, 3.3686, 3.2983, 3.2618, 3.2404),
        (3.4766, 3.4327, 3.3097, 3.3109, 3.3017),
    ),
    "qkv-shift": (  # Table 8
        (5.8747, 3.7215, 3.6750, 3.6752, 3.6798),
        (3.6543, 3.5793, 3.5301, 3.5391, 3.5213),
        (3.5482, 3.4584, 3.4190, 3.3847, 3.3836),
        (3.4678, 3.3783, 3.3307, 3.3013, 3.2835),
        (3.4518, 3.3769, 3.3081, 3.2725, 3.2620),
        (3.4994, 3.3710, 3.3063, 3.3486, 3.2662),
    ),
    "k-shift": (  # Table 9
        (3.7787, 3.7109, 3.6567, 3.6430, 3.6667),
        (3.6519, 3.5758, 3.5356, 3.5110, 3.5085),
        (3.5471, 3.4541, 3.4037, 3.3820, 3.3718),
        (3.4753, 3.3861, 3.3240, 3.2976, 3.2791),
        (3.4531, 3.3570, 3.3038, 3.2733, 3.2564),
        (3.4993, 3.3699, 3.3080, 3.3768, 3.2795),
    ),
    "v-shift": (  # Table 10
        (3.7742, 3.7061, 3.6698, 3.6512, 3.6610),
        (3.6366, 3.5574, 3.5253, 3.5044, 3.5038),
        (3.5300, 3.4494, 3.3980, 3.3775, 3.3639),
        (3.4599, 3.3711, 3.3234, 3.2895, 3.2745),
        (3.4425, 3.3489, 3.2915, 3.2622, 3.2658),
        (3.4805, 3.3556, 3.3798, 3.3130, 3.4101),
    ),
    "differential-no-qk-norm": (  # Table 11
        (3.9601, 3.9023, 3.8693, 3.8336, 3.8279),
        (3.7360, 3.6692, 3.6280, 3.6149, 3.6123),
        (3.5909, 3.5191, 3.4705, 3.4462, 3.4362),
        (5.8422, 3.4158, 3.3718, 3.3356, 3.3648),
        (3.7052, 3.7530, 3.7660, 4.1150, 3.3187),
        (7.8280, 6.6233, 6.4263, 3.3948, 3.4779),
    ),
    "differential": (  # Table 12
        (3.9622, 3.8999, 3.9122, 3.8484, 3.8559),
        (3.7218, 3.6624, 3.6245, 3.6154, 3.6222),
        (3.5800, 3.5080, 3.4703, 3.4688, 3.4476),
        (3.5305, 3.4076, 3.3840, 3.3512, 3.3482),
        (3.4998, 3.3930, 3.3478, 3.3635, 3.3543),
        (3.5607, 3.4142, 3.3566, 3.3573, 3.3489),
    ),
    "selective-key": (  # Table 13
        (3.7922, 3.7109, 3.6817, _OOM, _OOM),
        (3.6580, 3.5842, 3.5466, _OOM, _OOM),
        (3.5538, 3.4744, 3.4240, _OOM, _OOM),
        (3.4768, 3.3985, 3.3594, _OOM, _OOM),
        (3.4575, 3.4100, 3.3613, _OOM, _OOM),
        (3.4850, 3.4618, 3.4128, _OOM, _OOM),
    ),
}

_BY_LENGTH: Mapping[str, tuple[float, ...]] = {  # Table 15
    "mla": (3.5098, 3.415, 3.3608, 3.3188, 3.2976),
    "mla-kv-shift": (3.4987, 3.4069, 3.3414, 3.3002, 3.2753),
}


def _cells() -> dict[str, dict[tuple[float, int], float]]:
    tables = {variant: dict(zip(RATES, lines, strict=True)) for variant, lines in _PRINTED.items()}
    tables |= {variant: {MLA_RATE: losses} for variant, losses in _BY_LENGTH.items()}
    return {
        variant: {
            (rate, length): loss
            for rate, losses in lines.items()
            for length, loss in zip(LENGTHS, losses, strict=True)
            if loss is not None
        }
        for variant, lines in tables.items()
    }


LOSSES: Mapping[str, Mapping[tuple[float, int], float]] = _cells()
"""By variant, then by learning rate and context length; what was out of memory is left out."""
