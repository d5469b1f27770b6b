"""Polynomials in named quantities: equivalent computations have the same polynomial when reduced by the modulus.

A polynomial is a dict of integer coefficients by monomial; a monomial is the sorted tuple of its names.

    2 x y + 5    {("x", "y"): 2, (): 5}
"""

from __future__ import annotations

Polynomial = dict[tuple[str, ...], int]


def constant(number: int) -> Polynomial:
    """Return a number as a polynomial."""
    return {(): number}


def quantity(name: str) -> Polynomial:
    """Return a single quantity as a polynomial."""
    return {(name,): 1}


def combine(one: Polynomial, sign: str, other: Polynomial) -> Polynomial:
    """Return the sum, difference or product of two polynomials, for the sign +, - or *."""
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


def reduce_modulo(polynomial: Polynomial, modulus: int) -> Polynomial:
    """Reduce the coefficients by the modulus, and drop those that are 0."""
    return {names: number % modulus for names, number in polynomial.items() if number % modulus}
