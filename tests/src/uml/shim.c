/*
 * Preloaded into linux.uml for three reasons.
 *
 * Extended state. The 6.1 User-Mode Linux saves and restores a process's extended registers in a buffer of fixed size; on a CPU
 * with more state than that (AMX), the host answers a write of that short buffer with EFAULT and the guest's first process dies. Here
 * such a write is completed: read what the host holds, lay the guest's part over its start, write all of it.
 *
 * Sudden death. A guest's process is a process of the host that the guest's kernel traces, and in which no system call of its own ever
 * runs. When that kernel is killed, the host lets its tracees go on untraced: from then on their system calls are real ones, on the host, as
 * the user who started the guest. So each tracee is marked to die with its tracer.
 *
 * Speed. A flush of the guest would wait for the host's disk. What dies in these tests is the guest, never the host, and the host's page
 * cache outlives it; so a flush has nothing to do.
 *
 * Every other ptrace request goes to the host as it came. Only the three PEEK requests need care: the system call stores the word, while
 * the C library's function returns it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
	EXTENDED_STATE = 0x202, /* NT_X86_XSTATE */
	OLD_SET_OPTIONS = 21, /* The guest's kernel uses both numbers for setting options. */
};

static char state[1 << 16];

static long set_extended_state(long pid, struct iovec *part)
{
	struct iovec whole = { state, sizeof state };
	if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, EXTENDED_STATE, &whole) != 0)
		return -1;
	if (part->iov_len >= whole.iov_len)
		return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, EXTENDED_STATE, part);
	memcpy(whole.iov_base, part->iov_base, part->iov_len);
	return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, EXTENDED_STATE, &whole);
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list list;
	va_start(list, request);
	long pid = va_arg(list, int);
	void *address = va_arg(list, void *);
	void *data = va_arg(list, void *);
	va_end(list);

	switch ((int)request) {
	case PTRACE_SETOPTIONS:
	case OLD_SET_OPTIONS:
		data = (void *)((long)data | PTRACE_O_EXITKILL);
		break;
	case PTRACE_SETREGSET:
		if ((long)address == EXTENDED_STATE)
			return set_extended_state(pid, data);
		break;
	case PTRACE_PEEKTEXT:
	case PTRACE_PEEKDATA:
	case PTRACE_PEEKUSER: {
		long word = 0;
		if (syscall(SYS_ptrace, request, pid, address, &word) != 0)
			return -1;
		errno = 0;
		return word;
	}
	}
	return syscall(SYS_ptrace, request, pid, address, data);
}

int fsync(int file)
{
	(void)file;
	return 0;
}

int fdatasync(int file)
{
	(void)file;
	return 0;
}
