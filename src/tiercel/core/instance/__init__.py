"""An instance of an operator.

`Instance` (instance.py) is the machine that drivers call: runtime, simulator, tests. Its components see it
through small Protocols: processing (entries of its inbox), checkpoint_writer and checkpoint_loader, user_code
(calls of the operator), and its moves (core.migration.instance_moves). It can be built without moves.

Other packages import `Instance` and the types of user_code only. The package imports migration, state,
machine, messages and model.
"""
