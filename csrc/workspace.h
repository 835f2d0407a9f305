// Scratch memory: one arena a thread, kept between calls, so that a call allocates nothing once it
// has run at that size.
#pragma once

#include <cstdlib>
#include <new>

#include "problem.h"

namespace levelhead {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(base_); }

  // Room for `bytes`; what take() gave before is void.
  void reserve(std::size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    std::free(base_);
    base_ = nullptr;
    size_ = 0;
    if (posix_memalign(reinterpret_cast<void**>(&base_), kAlign, bytes)) throw std::bad_alloc();
    size_ = bytes;
  }

  template <class T>
  T* take(Index n) {
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += room<T>(n);
    return p;
  }

  template <class T>
  static constexpr std::size_t room(Index n) {
    return (static_cast<std::size_t>(n) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
  }

 private:
  static constexpr std::size_t kAlign = 64;
  char* base_ = nullptr;
  std::size_t size_ = 0, used_ = 0;
};

Workspace& thread_workspace();  // this thread's own

}  // namespace levelhead
