"""The check of phase 11c: an exponential by multiplications."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from flashlab.check import expect
from flashlab.check.cuda_answer import Source, built, ran, replaced, text_of
from flashlab.check.cuda_index import Trials, calls, explained
from flashlab.check.lookup import Row
from flashlab.cuda import CudaModule
from flashlab.exercises.registry import exercise
from flashlab.simt.source import blank_comments

# What may be called or used as a function; whatever else the text does not define itself is by somebody else's hand.
_BY_HAND = re.compile(
    r"(?:if|for|while|switch|return|sizeof|decltype|__launch_bounds__|exp2_polynomial|f(?:abs|min|max|ma)f?|"
    r"(?:rint|nearbyint|round|floor|ceil|trunc|copysign)f?|l?l?rintf|l?l?roundf|min|max|abs|u?int(?:8|16|32|64)?(?:_t)?|"
    r"unsigned|float|double|bool|long|short|(?:static|reinterpret|const|bit)_cast|memcpy|is(?:nan|inf|finite)|signbit|"
    r"__(?:float|double|u?int|u?ll)(?:_as_|2)\w+|__f(?:ma|mul|add|sub|maf)\w*)"
)
_ALLOWED = 2.0**-12  # half of what P's rounding to fp16 does
_X = torch.cat([torch.linspace(-126, 8, 9000), torch.arange(-126.0, 9), torch.linspace(-1, 1, 3001)])
_LOW = torch.tensor([-torch.inf, -1e30, -1000.0, -300.0, -200.0, -150.0, -129.0])
_HIGH = torch.cat([
    torch.linspace(8, 126, 2000), torch.tensor([127.4, 127.6, 128, 129, 200, 255, 256, 300]),
    torch.tensor([1000, 2.0**22 + 0.5, 1e10, 1e30, torch.inf]),
])  # fmt: skip


def _whole(text: str) -> Source:
    path = Path(__file__).parent / "phase_11_exp.cu"
    return replaced(Source(path.read_text(encoding="utf-8"), path.stem), "operands", text)


_FEW = torch.cat([torch.linspace(-3, 3, 61), torch.tensor([-126.0, -50.5, -20.0, 7.75])])
_ODD = torch.cat([_LOW, _HIGH[1990:], torch.tensor([torch.nan])])
_HORNER = ("0.0550089516f", "0.242211014f", "0.693282902f")
_CUT = "x < -127.f ? -127.f : x > 128.f ? 128.f : x"
POWERS = Trials(
    "11c.1", lambda text: built(text, check=True), place=lambda text: _whole(text).text, tol=1e-6,
    runs=[calls("run", x, None, len(x), out=(len(x),)) for x in (_FEW, _ODD)],
    words={"power": "2^n"},
    notes={
        "127": "a float keeps its exponent with 127 added", "23": "the exponent of a float is in bits 23 to 30",
        "n": "2^x = 2^n 2^f with f = x - n", "f": "2^x = 2^n 2^f with f = x - n",
    },
    most=40,  # further ones are far-fetched, and loop for minutes
    rows=[
        Row("other-power", "it is e^x: x is to be split as it is, without a factor",
            [(_CUT, f"(1.44269504f * x); x = {_CUT}")]),
        Row("other-power", "it is 2^-x: a sign is wrong", [(_CUT, f"-x; x = {_CUT}")]),
        Row("wrong-coefficients", "the polynomial is that of e^f: each power of f needs a factor ln 2 more",
            [*zip(_HORNER, ("0.1666667f", "0.5f", "1.f"), strict=True)]),
        Row("wrong-split", "x is cut towards 0, not rounded to the nearest whole number: f is to be in [-0.5, 0.5]",
            [("rintf(x)", "truncf(x)")]),
        Row("not-exact-enough", "these are Taylor's coefficients, best at 0 only: one term more, or such that spread "
            "the error", [*zip(_HORNER, ("0.0555041087f", "0.240226507f", "0.693147181f"), strict=True)]),
        Row("coefficients-turned-round", "the coefficients are in the opposite order",
            [(_HORNER[0] + ", " + _HORNER[1] + "), " + _HORNER[2],
              _HORNER[2] + ", " + _HORNER[1] + "), " + _HORNER[0])]),
        Row("nan-hidden", "fminf and fmaxf give their other argument for NaN, and hide it",
            [(_CUT, "fmaxf(fminf(x, 128.f), -127.f)")]),
    ],
)  # fmt: skip


@exercise(
    "11c.1",
    title="2 to the x, by multiplications",
    minutes=30,
    difficulty="Core",
    hints=[
        "2^x = 2^n * 2^f, with n the nearest whole number and f = x - n in [-0.5, 0.5]. 2^n needs no arithmetic: a "
        "float keeps its exponent, with 127 added, in bits 23 to 30.",
        "2^f by a polynomial, Horner's way: fmaf(f, fmaf(f, fmaf(f, c3, c2), c1), 1.f). Taylor's coefficients, ln 2, "
        "ln(2)^2 / 2, ln(2)^3 / 6, are best at 0 only: at -0.5 they err by 8e-4 of the value, where 2.4e-4 is "
        "allowed. One term more, or coefficients that spread the error: 0.6932829, 0.2422110, 0.0550090.",
        "n = rintf(x) and (int) n work. So does a trick without a conversion: x + 12582912.f rounds x to a whole "
        "number, and leaves it in the lowest bits; __float_as_uint(that) << 23 has it where the exponent is.",
        "Below -127 there is no such float: take the maximum of x and -127 first, so that -infinity does no harm. "
        "Which maximum keeps NaN? fmaxf(x, y) does not; x < -127.f ? -127.f : x does. From n = 128 on the exponent "
        "would run over as well: n = 128 itself has the bits of infinity, so cut there, and keep NaN.",
    ],
)
def powers_of_two(exp2_polynomial: str) -> str:
    text = text_of(exp2_polynomial, "exp2_polynomial")
    expect("exp2_polynomial(" in text, "the text should still define `exp2_polynomial`", diagnosis="wrong-entry")
    _expect_by_hand(blank_comments(text))
    whole = _whole(text)
    module = built(whole, check=True)
    with explained(lambda: module, POWERS):
        _expect_powers(module, whole)
    return f"{len(_X)} numbers, the largest error {_ALLOWED:.1e} or less; both infinities and NaN too"


def _expect_by_hand(code: str) -> None:
    __tracebackhide__ = True
    own = set(re.findall(r"(?:\b(?:float|int|u?int\d+_t|unsigned|bool|double|void|auto)|#define)\s+(\w+)\s*[(=]", code))
    called = re.findall(
        r"(\w+)\s*(?:<[^<>();]*>)?\s*\(|\b(asm|__asm__|_*(?:exp|exp2|exp10|expm1|pow)f?|exp2_approx)\b|(##)", code
    )
    foreign = [n for names in called for n in names if n and n not in own and not _BY_HAND.fullmatch(n)]
    expect(
        not foreign,
        f"`{foreign[0] if foreign else ''}` is what this function should do without: multiplications, additions and "
        "integer operations only",
        diagnosis="not-by-hand",
    )


def _expect_powers(module: CudaModule, whole: Source) -> None:
    __tracebackhide__ = True
    y, want = _powers(module, whole, _X).double(), torch.exp2(_X.double())
    error = ((y - want) / want).abs().nan_to_num(nan=torch.inf)
    at, worst = int(error.argmax()), float(error.max())
    fine = int((error <= _ALLOWED).sum())
    expect(
        worst <= _ALLOWED,
        f"exp2_polynomial({_X[at]:.6g}) is {y[at]:.6g}, and 2^x is {want[at]:.6g}: an error of {worst:.1e}, where "
        f"{_ALLOWED:.1e} is allowed ({fine} of {len(_X)} numbers are right)",
        diagnosis="not-exact-enough" if worst < 0.01 else "wrong-power",
    )
    y = _powers(module, whole, _LOW)
    at = int(((y < 0) | (y > 2.0**-120) | y.isnan()).int().argmax())
    expect(
        bool(0 <= y[at] <= 2.0**-120),
        f"right from -126 on, but exp2_polynomial({_LOW[at]:g}) is {y[at]:.4g}, and should be 0, or next to it: a "
        "masked score is -infinity, and an exponent below -127 runs over into the sign",
        diagnosis="wrong-below",
    )
    y, least = _powers(module, whole, _HIGH), torch.exp2(_HIGH.double().clamp(max=126))
    good = (y >= least * (1 - _ALLOWED)) & ((_HIGH > 126) | (y <= least * (1 + _ALLOWED)))
    at = int((~good).int().argmax())
    expect(
        bool(good[at]),
        f"right from -infinity to 8, but exp2_polynomial({_HIGH[at]:g}) is {y[at]:.4g}, and should be "
        f"{'2^126 or more' if _HIGH[at] > 126 else f'{least[at]:.4g}'}: an exponent from 129 on runs over",
        diagnosis="wrong-above",
    )
    y = _powers(module, whole, torch.tensor([torch.nan]))
    sentence = f"exp2_polynomial(NaN) is {y[0]:g}: a NaN among the scores should be seen in the result, not hidden"
    expect(bool(y.isnan()), sentence, diagnosis="nan-hidden")


def _powers(module: CudaModule, whole: Source, x: torch.Tensor) -> torch.Tensor:
    x, y = x.float().contiguous(), torch.zeros(len(x))
    ran(module, whole, None, lambda: module.launch("run", x, y, len(x), echo=False))
    return y
