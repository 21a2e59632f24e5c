"""Numbers with units, as messages show them."""


def size_text(count: float) -> str:
    """A number of bytes: below a megabyte in kB, from a gigabyte on in GB."""
    for limit, divisor, form in ((1e6, 1e3, "{:.1f} kB"), (1e9, 1e6, "{:.1f} MB")):
        if count < limit:
            return form.format(count / divisor)
    return f"{count / 1e9:.2f} GB"
