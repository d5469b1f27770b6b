"""Polynomials in named quantities: two ways to write one computation are one polynomial, reduced by the modulus.

A polynomial is a dict of integer coefficients by monomial; a monomial is the sorted tuple of its names.

    2 x y + 5    {("x", "y"): 2, (): 5}
"""

from __future__ import annotations

Polynomial = dict[tuple[str, ...], int]


def constant(number: int) -> Polynomial:
    """A number."""
    return {(): number}


def quantity(name: str) -> Polynomial:
    """A quantity by itself."""
    return {(name,): 1}


def combined(one: Polynomial, sign: str, other: Polynomial) -> Polynomial:
    """Their sum, difference or product, by the sign: +, - or *."""
    if sign == "*":
        product: Polynomial = {}
        for left, a in one.items():
            for right, b in other.items():
                names = tuple(sorted(left + right))
                product[names] = product.get(names, 0) + a * b
        return product
    if sign not in ("+", "-"):
        raise ValueError(f"sign must be +, - or *, got {sign!r}")
    total = dict(one)
    for names, b in other.items():
        total[names] = total.get(names, 0) + (b if sign == "+" else -b)
    return total


def reduced(polynomial: Polynomial, modulus: int) -> Polynomial:
    """With coefficients 1 ... modulus - 1."""
    return {names: number % modulus for names, number in polynomial.items() if number % modulus}
