"""Calculations spelled out digit by digit, units first, each step a fact about small numbers."""


def add_steps(a: int, b: int) -> str:
    """47+38: 7+8=15, write 5, carry 1. 4+3+1=8, write 8. So 85."""
    left, right = _columns(a, b)
    if len(left) == 1:
        return f"{a}+{b}={a + b}."
    steps: list[str] = []
    carry = 0
    for index, (p, q) in enumerate(zip(left, right, strict=True)):
        total = p + q + carry
        written = f"{p}+{q}+{carry}" if carry else f"{p}+{q}"
        is_last = index + 1 == len(left)
        carry = 0 if is_last else total // 10
        ending = f", carry {carry}." if carry else "."
        steps.append(f"{written}={total}, write {total if is_last else total % 10}{ending}")
    return f"{a}+{b}: {' '.join(steps)} So {a + b}."


def subtract_steps(a: int, b: int) -> str:
    """52-38: 2-8, borrow, 12-8=4. 5-1-3=1. So 14."""
    if a < b:
        return f"{a} is less than {b}, so minus. {subtract_steps(b, a)} So -{b - a}."
    left, right = _columns(a, b)
    if len(left) == 1:
        return f"{a}-{b}={a - b}."
    steps: list[str] = []
    borrow = 0
    for p, q in zip(left, right, strict=True):
        written = f"{p}-{borrow}-{q}" if borrow else f"{p}-{q}"
        rest = p - borrow - q
        if rest < 0:
            top = f"{p + 10}-{borrow}-{q}" if borrow else f"{p + 10}-{q}"
            steps.append(f"{written}, borrow, {top}={rest + 10}.")
            borrow = 1
        else:
            steps.append(f"{written}={rest}.")
            borrow = 0
    return f"{a}-{b}: {' '.join(steps)} So {a - b}."


def multiply_steps(a: int, b: int) -> str:
    """46*7: 40*7=280, 6*7=42, 280+42=322. So 322."""
    if a < b:
        a, b = b, a
    if a <= 10 or b <= 1:
        return f"{a}*{b}={a * b}."
    if b >= 10:
        tens, units = b - b % 10, b % 10
        steps = f"{a}*{tens}={a * tens}, {a}*{units}={a * units}, "
        return f"{a}*{b}: {steps}{a * tens}+{a * units}={a * b}. So {a * b}."
    tens, units = a - a % 10, a % 10
    steps = f"{tens}*{b}={tens * b}, {units}*{b}={units * b}, "
    return f"{a}*{b}: {steps}{tens * b}+{units * b}={a * b}. So {a * b}."


def divide_steps(a: int, b: int) -> str:
    """56/7: 8*7=56. So 8."""
    return f"{a}/{b}: {a // b}*{b}={a}. So {a // b}."


def _columns(a: int, b: int) -> tuple[list[int], list[int]]:
    """Digits from the units on, as many of both."""
    width = max(len(str(a)), len(str(b)))
    return (
        [int(digit) for digit in reversed(str(a).zfill(width))],
        [int(digit) for digit in reversed(str(b).zfill(width))],
    )
