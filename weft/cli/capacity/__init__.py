"""The verbs `plan` and `tune`: measuring, printing and applying around `weft/capacity`."""
