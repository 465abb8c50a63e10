"""`loss_scaled`, `master_params` and `GradScaler` keep the contract. The frameworks' adapters: integrations."""

import pytest
from contract import ADAPTERS, CHECKS, check_skips

WHOLE = {"loss_scaled", "split masters", "scaled", "GradScaler"}  # The others are variants of the first.
CASES = [
    pytest.param(name, check, marks=[pytest.mark.slow] * (name not in WHOLE and check is not check_skips))
    for name in ADAPTERS
    for check in CHECKS
]


@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
@pytest.mark.parametrize(("name", "check"), CASES)
def test_keeps_the_contract(name, check):
    check(ADAPTERS[name])
