"""The paper's theorems as code: for each claim a construction, a bound and what it takes to check them.

| file | claim |
|---|---|
| `induction_head.py` | Definition 3.1: the induction head that the theorems speak of |
| `two_layer_head.py` | Theorem 3.2: two vanilla layers come near it, at twice the width |
| `one_layer_head.py` | Theorem 3.3: one layer with KV shift is it |
| `limit_loss.py` | Theorem 3.4, Table 3: the loss in closed form, as derived and as printed |
| `finite_model.py` | the model that Theorem 3.4 is the limit of |
| `loss_field.py` | Figure 2: loss and descent directions over a square of coefficients |
| `gradient_flow.py` | where gradient descent leads when all four coefficients are free |

`checks.py` puts numbers to all of them, and `python -m kvshift.lab.theory` prints these: docs/theory.md quotes them.
All in float64.
"""
