// Stands in for a machine whose time is set while a job runs: the wall clock goes back and forth by an hour, fifty
// times a second. A wait that is to last a time must not notice; the steady clock is as it was.
#include <dlfcn.h>
#include <sys/time.h>

#include <ctime>

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const auto real = reinterpret_cast<int (*)(clockid_t, timespec*)>(::dlsym(RTLD_NEXT, "clock_gettime"));
  const int result = real(clock, time);
  if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE) return result;
  time->tv_sec += time->tv_nsec / 20000000 % 2 ? 3600 : -3600;
  return result;
}

int gettimeofday(timeval* time, void*) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *time = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* result) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
}
