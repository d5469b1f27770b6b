"""The paper's theorems as code: a construction, a bound and numerical checks for each claim.

| file | claim |
|---|---|
| `induction_head.py` | Definition 3.1: the induction head of the theorems |
| `two_layer_head.py` | Theorem 3.2: two vanilla layers approximate it, at twice the width |
| `one_layer_head.py` | Theorem 3.3: one layer with KV shift implements it exactly |
| `limit_loss.py` | Theorem 3.4, Table 3: the loss in closed form, as derived and as printed |
| `finite_model.py` | the model whose limit Theorem 3.4 states |
| `loss_field.py` | Figure 2: loss and descent directions over a square of coefficients |
| `gradient_flow.py` | where gradient descent leads when all four coefficients are free |

`checks.py` computes numbers for all claims, and `python -m kvshift_lab.theory` prints them; docs/theory.md quotes them.
All computations use float64.
"""
