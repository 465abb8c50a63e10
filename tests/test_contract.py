"""`loss_scaled`, `master_params` and `GradScaler` keep the contract. The frameworks' adapters: integrations."""

import pytest
from contract import ADAPTERS, EVERY_CHECK


@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
@pytest.mark.parametrize("name", ADAPTERS)
@EVERY_CHECK
def test_keeps_the_contract(name, check):
    check(ADAPTERS[name])
