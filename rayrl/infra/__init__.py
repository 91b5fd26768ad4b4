"""The cluster underneath: placement, actor groups, deadlines, collective groups and the transfer of weights."""
