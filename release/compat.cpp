// The functions that g++ 12's headers call and glibc 2.28 does not have, for release/link_stubs.py. They are
// linked into each binary of a wheel and not exported.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

extern "C" {

// glibc 2.32 tells here if a process has one thread, so that counters need no atomic operation. "No" is
// always right.
char __libc_single_threaded = 0;

// Until glibc 2.33, stat and fstat were functions of libc_nonshared.a that called these; the first argument
// is the layout of the struct.
int __xstat(int layout, const char* path, struct stat* result);
int __fxstat(int layout, int fd, struct stat* result);

#ifdef __x86_64__
enum { kLayout = 1 };
#else
enum { kLayout = 0 };
#endif

int stat(const char* path, struct stat* result) { return __xstat(kLayout, path, result); }
int fstat(int fd, struct stat* result) { return __fxstat(kLayout, fd, result); }

// glibc 2.30: a wait until a time of a clock that nobody sets. Where there is none the time is converted to
// that of the wall clock; C++'s wait_until reads its own clock again when this returns.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  using Wait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  static const Wait of_libc = reinterpret_cast<Wait>(dlsym(RTLD_NEXT, "pthread_cond_clockwait"));
  if (of_libc != nullptr) return of_libc(condition, mutex, clock, until);
  struct timespec now, wall;
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &wall) != 0) return errno;
  wall.tv_sec += until->tv_sec - now.tv_sec;
  wall.tv_nsec += until->tv_nsec - now.tv_nsec;
  while (wall.tv_nsec < 0) wall.tv_nsec += 1000000000, wall.tv_sec -= 1;
  while (wall.tv_nsec >= 1000000000) wall.tv_nsec -= 1000000000, wall.tv_sec += 1;
  return pthread_cond_timedwait(condition, mutex, &wall);
}
}
