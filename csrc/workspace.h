// Scratch memory: one arena per thread, kept between calls, so that a call allocates nothing once it
// has run at that size.
#pragma once

#include <cstdlib>
#include <new>
#include <utility>

#include "problem.h"

// Under AddressSanitizer the arrays that take() gave are ringed by memory that must not be touched:
// the arena is one block to ASan, and a step from one array into the next would go unseen.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)0)
#endif

namespace levelhead {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { release(); }

  // Room for `bytes`; what take() gave before is void.
  void reserve(std::size_t bytes) {
    used_ = 0;
    if (bytes > size_) {
      release();
      if (posix_memalign(reinterpret_cast<void**>(&base_), kAlign, bytes)) throw std::bad_alloc();
      size_ = bytes;
    }
    ASAN_POISON_MEMORY_REGION(base_, size_);
  }

  void swap(Workspace& other) {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    std::swap(used_, other.used_);
  }

  template <class T>
  T* take(Index n) {
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += room<T>(n);
    ASAN_UNPOISON_MEMORY_REGION(p, static_cast<std::size_t>(n) * sizeof(T));
    return p;
  }

  template <class T>
  static constexpr std::size_t room(Index n) {
    return (static_cast<std::size_t>(n) * sizeof(T) + kAlign - 1) / kAlign * kAlign + kGap;
  }

 private:
  static constexpr std::size_t kAlign = 64;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kGap = kAlign;
#else
  static constexpr std::size_t kGap = 0;
#endif

  void release() {
    ASAN_UNPOISON_MEMORY_REGION(base_, size_);
    std::free(base_);
    base_ = nullptr;
    size_ = 0;
  }

  char* base_ = nullptr;
  std::size_t size_ = 0, used_ = 0;
};

Workspace& thread_workspace();  // this thread's own

}  // namespace levelhead
