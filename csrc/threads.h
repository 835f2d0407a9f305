// The pool: tasks 0 ... n-1 handed out one by one to whoever is free. Which thread ran a task never
// shows in the result, so any number of threads gives the same bits.
#pragma once

#include <utility>

#include "problem.h"

namespace levelhead {

// Thrown where work ends because its caller was interrupted.
struct Interrupted {};

// While it lives, long work of this thread asks ten times a second whether it should stop. If so, it ends
// with Interrupted on all threads.
class Interruptible {
 public:
  explicit Interruptible(bool (*should_stop)());
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;
  bool stopped() const;
};

// Long work calls this every few milliseconds; it throws Interrupted if it is time to stop.
void checkpoint();

// What this process may use: its affinity mask, its cgroup's CPU quota, OMP_NUM_THREADS.
int available_threads();

// Runs task(context, i) for each i in [0, n) on at most `threads` threads, the caller's among them.
// While another Python thread holds the pool, the caller works alone instead of oversubscribing.
// The first exception is rethrown here. Works in a forked child: it starts a pool of its own.
void run_tasks(Index n, int threads, void (*task)(void*, Index), void* context);

template <class F>
void parallel_for(Index n, int threads, F&& f) {
  if (n <= 1 || threads <= 1) {
    for (Index i = 0; i < n; ++i) f(i);
    return;
  }
  run_tasks(n, threads, [](void* context, Index i) { (*static_cast<std::decay_t<F>*>(context))(i); },
            &f);
}

}  // namespace levelhead
