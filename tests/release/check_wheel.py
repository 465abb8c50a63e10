"""The metadata of the built distributions: run pytest on this file after `python -m build --outdir dist`."""

import tarfile
import zipfile
from email import message_from_string
from email.policy import default

import pytest
from long_description import ROOT, relative, rendered


def wheels():
    with zipfile.ZipFile(*(ROOT / "dist").glob("*.whl")) as file:
        return file.read(next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))).decode()


def sdists():
    with tarfile.open(*(ROOT / "dist").glob("*.tar.gz")) as file:
        name = next(name for name in file.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        return file.extractfile(name).read().decode()


@pytest.mark.parametrize("read", [wheels, sdists])
def test_the_page_of_the_release_is_the_readme_without_relative_links(read):
    metadata = message_from_string(read(), policy=default)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == rendered().strip()
    assert not relative(metadata.get_payload())
