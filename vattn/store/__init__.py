"""Blocks of prefixes in files, so that they survive the process that computed them. Bytes in, bytes out: no torch.

blockfile    one block as a file: how it is written, and what is checked before anything of it is believed
folder       `PrefixStore`: a folder of such files, shared by processes of one user, within a quota
background   threads that write behind an engine, and read ahead of it
"""
