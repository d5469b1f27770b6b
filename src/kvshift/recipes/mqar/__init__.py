"""MQAR, multi-query associative recall: a task of the paper's related work, in the setting of Zoology."""
