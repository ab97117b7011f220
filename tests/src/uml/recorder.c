/*
 * Preloaded into linux.uml to record what the guest's devices are asked for.
 *
 * One thread of User-Mode Linux does the input and output of all its block devices, one call after the other. Every write and flush of every
 * image passes here, so the recording is one order over all devices, taken below the guest's kernel, which runs as it always does.
 *
 * Flushes. The driver offers a volatile write cache, and its thread then does nothing for a flush: the request has no pieces, and the thread
 * makes one system call a piece. So this looks at the queue. The thread reads pointers to requests from a socket, as many as there are (a
 * batch), does them, writes the pointers back and reads again. A request without pieces is a flush. That depends on how the 6.1 kernel lays
 * out a request, so it is checked all the time: each request must make as many calls as it has pieces, or the guest is ended.
 *
 * What a flush covers. A disk owes it to a flush that all is durable which it had answered when the flush was asked for, not what happened to be
 * done before. The kernel asks by writing a pointer to its end of the socket; the last batch that was answered by then is noted.
 *
 * Environment: BCACHED_RECORDING is the file to append to, BCACHED_RECORDED_IMAGES the images, one path a line; a record names an image by
 * its place in that list. A guest whose recording would have a gap is ended.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, FLUSH = 2, DISCARD = 3 };
enum { IMAGES_MAX = 16, BATCH_MAX = 512, ASKED_MAX = 4096, SECTOR = 512 };

/* What stands before a write's bytes, and alone for the others; as tests/src/recording/mod.rs reads it. */
struct record {
	uint32_t kind;
	uint32_t image;
	/* In bytes; of a flush: the last batch whose writes it covers. */
	uint64_t offset;
	uint64_t length;
	uint64_t batch;
};

/* The beginning of a request as the 6.1 kernel gives it to the thread. */
struct request {
	/* The block layer's request; in a copy, the address that the copy was made from. */
	void *origin;
	int files[2];
	unsigned long offsets[2];
	unsigned long long offset;
	int sector_size;
	int error;
	int pieces;
};

/* The guest's kernel; the thread of its devices shares its thread-local storage, so they are told apart by number. */
static long kernel_thread;
static struct stat images[IMAGES_MAX];
static uint32_t image_count;
static int recording = -1;
/* Batches the thread has taken from its queue, and the last of them that it has answered. */
static uint64_t batch, answered;
/* The batch at work: its requests (copies: an answered one is freed), the one whose turn it is, and the calls that one has made. */
static struct request requests[BATCH_MAX];
static size_t request_count, turn;
static int calls;
/* Requests the kernel has put into the queue, round about, and what had been answered then. */
static struct { void *request; uint64_t answered; } asked[ASKED_MAX];
static size_t asked_count;

/* The device thread is a process of its own: without it the guest would wait for ever. */
static void give_up(const char *why)
{
	dprintf(STDOUT_FILENO, "recorder: %s\n", why);
	kill((pid_t)kernel_thread, SIGKILL);
	abort();
}

__attribute__((constructor)) static void open_recording(void)
{
	const char *path = getenv("BCACHED_RECORDING");
	const char *list = getenv("BCACHED_RECORDED_IMAGES");
	if (!path || !list)
		return;
	kernel_thread = syscall(SYS_gettid);
	char *paths = strdup(list), *rest = paths;
	for (char *image; rest && (image = strsep(&rest, "\n")) && image_count < IMAGES_MAX;)
		if (stat(image, &images[image_count++]) != 0)
			give_up("an image is missing");
	free(paths);
	recording = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
	if (recording < 0)
		give_up("the recording cannot be opened");
}

/* The place of a file among the images, or -1. */
static int image_of(int file)
{
	struct stat found;
	if (recording < 0 || fstat(file, &found) != 0)
		return -1;
	for (uint32_t image = 0; image < image_count; image++)
		if (images[image].st_dev == found.st_dev && images[image].st_ino == found.st_ino)
			return (int)image;
	return -1;
}

static void append(uint32_t kind, int image, uint64_t offset, const void *bytes, uint64_t length)
{
	struct record record = { kind, (uint32_t)image, offset, length, batch };
	struct iovec parts[] = { { &record, sizeof record }, { (void *)bytes, bytes ? length : 0 } };
	long whole = (long)(parts[0].iov_len + parts[1].iov_len);
	if (syscall(SYS_writev, recording, parts, 2) != whole)
		give_up("the recording cannot be written");
}

/* What had been answered when the kernel asked for the request at this address. */
static uint64_t answered_before(const void *request)
{
	size_t count = __atomic_load_n(&asked_count, __ATOMIC_ACQUIRE);
	for (size_t back = 1; back <= count && back <= ASKED_MAX; back++)
		if (asked[(count - back) % ASKED_MAX].request == request)
			return asked[(count - back) % ASKED_MAX].answered;
	give_up("a request that nobody asked for");
	return 0;
}

/* Records the flushes whose turn it is. */
static void pass_flushes(void)
{
	while (turn < request_count && calls == requests[turn].pieces) {
		int image = image_of(requests[turn].files[0]);
		if (image < 0 || requests[turn].sector_size != SECTOR)
			give_up("a request that is none");
		if (requests[turn].pieces == 0)
			append(FLUSH, image, answered_before(requests[turn].origin), NULL, 0);
		turn++;
		calls = 0;
	}
}

static int is_device_thread(void)
{
	return recording >= 0 && syscall(SYS_gettid) != kernel_thread;
}

/* A call of the device thread for the piece of a request. */
static void piece(int file)
{
	pass_flushes();
	if (turn == request_count || requests[turn].files[0] != file)
		give_up("a call that no request makes");
	calls++;
}

static int is_socket(int file)
{
	struct stat found;
	return fstat(file, &found) == 0 && S_ISSOCK(found.st_mode);
}

static void begin_batch(void *const *pointers, size_t count)
{
	if (count > BATCH_MAX)
		give_up("a batch that is none");
	for (size_t place = 0; place < count; place++) {
		memcpy(&requests[place], pointers[place], sizeof *requests);
		requests[place].origin = pointers[place];
	}
	request_count = count;
	turn = 0;
	calls = 0;
	batch++;
}

ssize_t read(int file, void *bytes, size_t count)
{
	ssize_t got = syscall(SYS_read, file, bytes, count);
	if (got > 0 && is_device_thread() && is_socket(file)) {
		if ((size_t)got % sizeof(void *) != 0)
			give_up("half a pointer");
		begin_batch(bytes, (size_t)got / sizeof(void *));
	}
	return got;
}

/* Pointers go both ways. What counts is noted before they are gone: nobody may know of an answer earlier than this does. */
ssize_t write(int file, const void *bytes, size_t count)
{
	if (recording >= 0 && count % sizeof(void *) == 0 && is_socket(file)) {
		if (is_device_thread()) {
			pass_flushes();
			if (turn != request_count)
				give_up("a request that made too few calls");
			__atomic_store_n(&answered, batch, __ATOMIC_RELEASE);
		} else if (count == sizeof(void *)) {
			size_t place = asked_count % ASKED_MAX;
			memcpy(&asked[place].request, bytes, count);
			asked[place].answered = __atomic_load_n(&answered, __ATOMIC_ACQUIRE);
			__atomic_store_n(&asked_count, asked_count + 1, __ATOMIC_RELEASE);
		}
	}
	return syscall(SYS_write, file, bytes, count);
}

ssize_t pread64(int file, void *bytes, size_t count, off64_t offset)
{
	if (is_device_thread())
		piece(file);
	return syscall(SYS_pread64, file, bytes, count, offset);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t offset)
{
	int image = image_of(file);
	if (image >= 0)
		piece(file);
	ssize_t written = syscall(SYS_pwrite64, file, bytes, count, offset);
	if (image >= 0 && written > 0)
		append(WRITE, image, (uint64_t)offset, bytes, (uint64_t)written);
	return written;
}

int fallocate64(int file, int mode, off64_t offset, off64_t length)
{
	int image = image_of(file);
	if (image >= 0) {
		piece(file);
		append(DISCARD, image, (uint64_t)offset, NULL, (uint64_t)length);
	}
	return (int)syscall(SYS_fallocate, file, mode, offset, length);
}
