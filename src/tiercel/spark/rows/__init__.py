"""Rows and values between users and the core.

`row_codec` is the codec of one stream's rows; its functions (`take`, `gather`, `pack`, ...) are generated
by `codegen`. `values` converts single values by type, `row_types` makes rows, `columnar` takes whole
columns, `ddl` parses schemas. All other rooms of `tiercel.spark` call this one; it calls none of them.
"""
