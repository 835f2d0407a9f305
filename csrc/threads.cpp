#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "workspace.h"

namespace levelhead {
namespace {

int cgroup_quota() {
  long long quota = 0, period = 0;
  if (std::FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {  // "max 100000" has no limit
    const int got = std::fscanf(f, "%lld %lld", &quota, &period);
    std::fclose(f);
    if (got == 2 && quota > 0 && period > 0)
      return static_cast<int>(std::ceil(static_cast<double>(quota) / static_cast<double>(period)));
  }
  return 0;
}

// Is this process a fork of another that no new program has replaced? Linux marks it with a flag.
bool is_fork() {
  constexpr unsigned kForkNoExec = 0x40;
  unsigned flags = kForkNoExec;
  if (std::FILE* f = std::fopen("/proc/self/stat", "r")) {  // "pid (name) state ppid ... flags"
    if (std::fscanf(f, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %u", &flags) != 1) flags = kForkNoExec;
    std::fclose(f);
  }
  return flags & kForkNoExec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr auto kPause = std::chrono::milliseconds(100);  // between two questions

// What the threads that work on one interruptible call share.
struct Stop {
  bool (*should_stop)() = nullptr;  // only the calling thread may ask
  std::chrono::steady_clock::time_point next_question = {};
  std::atomic<bool> stopped{false};

  void ask();
};
thread_local Stop own_stop;             // of the calls that this thread makes
thread_local Stop* the_stop = nullptr;  // of the call that this thread works on

void Stop::ask() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_question) return;
  next_question = now + kPause;
  // A signal's handler may call us again, on this thread: with scratch memory of its own.
  Workspace mine;
  mine.swap(thread_workspace());
  const bool stop = should_stop();
  mine.swap(thread_workspace());
  the_stop = this;
  if (stop) stopped = true;
}

// Waiting for others to finish the call, without being deaf to an interrupt.
void wait_a_moment() {
  relax();
  if (the_stop == &own_stop) own_stop.ask();
}

struct Job {
  Stop* const stop = the_stop;
  void (*task)(void*, Index) = nullptr;
  void* context = nullptr;
  Index n = 0;
  std::atomic<Index> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;

  void work() {
    Stop* const before = std::exchange(the_stop, stop);
    for (Index i; !failed.load(std::memory_order_relaxed) && (i = next.fetch_add(1)) < n;) {
      try {
        task(context, i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
    the_stop = before;
  }
};

// PyTorch's OpenMP threads go on spinning for milliseconds after each of its operators, and workers of
// our own would have to share the cores with them. So where OpenMP is in the process and has threads
// enough, they do the work. Not in a forked child: it has none of its parent's threads, and OpenMP
// would wait for them forever.
class OpenMP {
 public:
  // False if it is not there for so many threads; then nothing was done.
  bool try_run(Job& job, int threads) {
    if (!parallel_ && !find()) return false;
    if (is_child_ || getpid() != home_ || max_threads_() < threads) return false;
    Team team{job, threads};
    // All of its threads, as OpenMP ends those that a smaller team leaves out.
    parallel_([](void* t) { static_cast<Team*>(t)->join(); }, &team,
              static_cast<unsigned>(max_threads_()), 0);
    return true;
  }

 private:
  struct Team {
    Job& job;
    std::atomic<int> room;
    std::atomic<int> active{0};
    const std::thread::id caller = std::this_thread::get_id();

    void join() {
      if (room.fetch_sub(1) <= 0) return;
      active.fetch_add(1);
      job.work();
      active.fetch_sub(1);
      while (std::this_thread::get_id() == caller && active.load() != 0) wait_a_moment();
    }
  };
  void (*parallel_)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*max_threads_)() = nullptr;
  const bool is_child_ = is_fork();
  const pid_t home_ = getpid();

  // PyTorch may be imported at any time.
  bool find() {
    max_threads_ = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    if (max_threads_)
      parallel_ = reinterpret_cast<decltype(parallel_)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return parallel_ != nullptr;
  }
};
OpenMP openmp;

// Workers wait a moment spinning (calls often come in a row, and waking a sleeper costs tens of
// microseconds), then sleep, so that an idle pool takes nothing from PyTorch's or anyone's threads.
class Pool {
 public:
  // False if the pool is at work for someone else.
  bool try_run(Job& job, int helpers) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner) return false;
    if (openmp.try_run(job, helpers + 1)) return true;
    while (static_cast<int>(workers_) < helpers) {
      try {
        std::thread(&Pool::loop, this, static_cast<int>(workers_)).detach();
      } catch (const std::system_error&) {
        break;  // no more threads to be had: the rest do the work
      }
      ++workers_;
    }
    helpers = helpers < workers_ ? helpers : workers_;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      invited_ = helpers;
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load() > 0) wake_.notify_all();
    job.work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;  // who has not come by now is not waited for
    }
    while (active_.load(std::memory_order_acquire) != 0) wait_a_moment();
    return true;
  }

 private:
  static constexpr int kSpins = 4000;  // about 50 to 100 microseconds

  void loop(int id) {
    std::uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; generation_.load(std::memory_order_acquire) == seen; ++spin) {
        if (spin < kSpins) {
          relax();
          continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        sleepers_.fetch_sub(1);
      }
      Job* job = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        seen = generation_.load(std::memory_order_relaxed);
        if (id < invited_) job = job_;
        if (job) active_.fetch_add(1, std::memory_order_relaxed);
      }
      if (!job) continue;
      job->work();
      active_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> sleepers_{0}, active_{0};
  Job* job_ = nullptr;
  int invited_ = 0, workers_ = 0;
};

// Never destroyed: detached workers may still look at it while the process exits. A forked child
// has none of its parent's threads, and perhaps a lock that nobody will release: it gets a new pool.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    the_pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool; });
  });
  return *the_pool;
}

}  // namespace

Interruptible::Interruptible(bool (*should_stop)()) {
  own_stop.should_stop = should_stop;
  own_stop.next_question = std::chrono::steady_clock::now() + kPause;
  own_stop.stopped = false;
  the_stop = &own_stop;
}
Interruptible::~Interruptible() { the_stop = nullptr; }
bool Interruptible::stopped() const { return own_stop.stopped; }

void checkpoint() {
  if (!the_stop) return;
  if (the_stop == &own_stop) own_stop.ask();
  if (the_stop->stopped.load(std::memory_order_relaxed)) throw Interrupted();
}

int available_threads() {
  int n = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
  if (const int quota = cgroup_quota(); quota > 0 && quota < n) n = quota;
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const int wish = std::atoi(text);
    if (wish > 0 && wish < n) n = wish;
  }
  return n > 0 ? n : 1;
}

void run_tasks(Index n, int threads, void (*task)(void*, Index), void* context) {
  Job job;
  job.task = task;
  job.context = context;
  job.n = n;
  const Index helpers = (threads < n ? threads : n) - 1;
  if (helpers <= 0 || !pool().try_run(job, static_cast<int>(helpers))) job.work();
  if (job.error) std::rethrow_exception(job.error);
}

Workspace& thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

}  // namespace levelhead
