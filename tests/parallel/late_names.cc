// Preloaded into ranks: Horovod's trace of a collective stops for 50 ms before it prints the name, as a thread does that
// loses its core there. By then the collective has been carried out, and what it no longer needs is freed and overwritten.
#include <dlfcn.h>
#include <malloc.h>
#include <unistd.h>

#include <cstring>

#define PAUSED "paused before a name\n"
#define INSERT "_ZSt16__ostream_insertIcSt11char_traitsIcEERSt13basic_ostreamIT_T0_ES6_PKS3_l"

extern "C" void* insert(void* stream, const char* text, long length) __asm__(INSERT);

extern "C" void* insert(void* stream, const char* text, long length) {
  using Insert = void* (*)(void*, const char*, long);
  static const auto original = reinterpret_cast<Insert>(dlsym(RTLD_NEXT, INSERT));
  void* const result = original(stream, text, length);
  if (length == 9 && std::memcmp(text, "Enqueued ", 9) == 0) {
    mallopt(M_PERTURB, 0xa5);
    if (write(STDERR_FILENO, PAUSED, sizeof PAUSED - 1) < 0) _exit(1);
    usleep(50000);
  }
  return result;
}
