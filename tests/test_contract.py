"""`loss_scaled`, `master_params` and `GradScaler` keep the contract. The frameworks' adapters: integrations."""

import pytest
from contract import ADAPTERS, CHECKS, check_noop, check_skips

WHOLE = {"loss_scaled", "split masters", "scaled", "GradScaler", "skip_nonfinite"}  # The others are variants.
CASES = [
    pytest.param(name, check, marks=[pytest.mark.slow] * (name not in WHOLE and check is not check_skips))
    for name in ADAPTERS
    for check in CHECKS
    if ADAPTERS[name].adapts or check is not check_noop
]


@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
@pytest.mark.parametrize(("name", "check"), CASES)
def test_keeps_the_contract(name, check):
    check(ADAPTERS[name])
