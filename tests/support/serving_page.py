"""Examples of docs/serving.md as they stand, but for the port."""

from pathlib import Path

_PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text()
CLIENT = _PAGE.partition("```python\n# my_client.py\n")[2].partition("```")[0]


def command(beginning: str, port: int) -> str:
    """Return the command of the page that begins so, for a server on `port` of this machine."""
    found = _PAGE.partition(f"```bash\n{beginning}")[2].partition("```")[0]
    assert "30000" in found, beginning
    return f"{beginning}{found.replace('30000', str(port))}"
