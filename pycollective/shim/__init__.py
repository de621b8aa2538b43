"""The torch shim, ``pycollective._torch``: how it is compiled, found and loaded.

It is compiled against one minor version of torch, so there are several: an editable install has its
own, a wheel brings some, and ``pycollective build-torch`` builds one for the user.
"""
