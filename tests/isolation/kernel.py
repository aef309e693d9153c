"""What programs in slots begin with to ask the kernel for things, for the tests of what they get."""

KERNEL = """
import array, ctypes, errno, fcntl, json, mmap, os, resource, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def syscall(number, *arguments):
    return check(libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments)]))
def outcome(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
"""
