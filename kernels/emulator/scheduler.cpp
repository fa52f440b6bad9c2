// Who runs next, and what is wrong when nobody can?
//
// Blocks run one after another, the threads of a block in turns: each until it waits for others or returns. A warp
// call is released when every lane of its mask has arrived, a barrier when every thread of the block has.
#include "scheduler.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "checker.h"
#include "fiber.h"

dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulator {
namespace {

int multiprocessors = 2;

constexpr size_t kSharedBytes = 48 * 1024;  // what every GPU gives a block that does not ask for more

struct Wait {
  Call call;
  unsigned mask;
  uint64_t brought;
  int source;
  Place place;
};

struct Thread {
  enum class State { kReady, kInWarpCall, kAtBarrier, kReturned };
  Fiber fiber;
  State state;
  Wait wait;
  uint64_t received;
};

const char* name_of(Call call) {
  switch (call) {
    case Call::kShuffle: return "__shfl_sync";
    case Call::kShuffleXor: return "__shfl_xor_sync";
    case Call::kShuffleUp: return "__shfl_up_sync";
    case Call::kShuffleDown: return "__shfl_down_sync";
    case Call::kBallot: return "__ballot_sync";
    case Call::kSyncWarp: return "__syncwarp";
    case Call::kSyncThreads: return "__syncthreads";
  }
  return "?";
}

std::string text(const Wait& wait) { return std::string(name_of(wait.call)) + " at " + text(wait.place); }

std::string text(const dim3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

bool same_place(const Wait& a, const Wait& b) {
  return a.call == b.call && a.place.line == b.place.line && std::string_view(a.place.file) == b.place.file;
}

// "softmax_forward<float>" of "megatronish::{anonymous}::softmax_forward<float>".
std::string without_namespaces(std::string_view kernel) {
  const size_t colon = kernel.substr(0, kernel.find('<')).rfind(':');
  return std::string(kernel.substr(colon == kernel.npos ? 0 : colon + 1));
}

class Scheduler {
 public:
  void run(const Launch& launch, std::string_view kernel, Body body, const void* parameters, size_t parameters_bytes);
  void set_order(Order order, uint64_t seed) {
    order_ = order;
    random_.seed(seed);
  }

  // Called by threads of the kernel, on their own stacks.
  uint64_t wait_for_warp(const Wait& wait);
  void wait_for_block(const Wait& wait);
  int lane() const { return at_work_ % warpSize; }
  void* dynamic_shared_memory() const { return dynamic_.get(); }
  [[noreturn]] void fail(const std::string& finding);

 private:
  void refuse_invalid() const;
  void run_block(unsigned number);
  bool run_warp(int warp);
  void take_turn(int number);
  bool release_warp(int warp);
  void release(int first, const Wait& wait);
  bool release_barrier();
  [[noreturn]] void report_deadlock() const;
  std::vector<unsigned> in_order(unsigned count);
  dim3 index_of(unsigned number, const dim3& extent) const;
  std::string with_context(const std::string& finding) const;
  int lanes_of(int warp) const { return std::min(warpSize, num_threads_ - warp * warpSize); }
  static void entry();

  Stacks stacks_;
  std::vector<Thread> threads_{Stacks::kCount};
  Fiber home_;
  int at_work_ = -1;  // the thread whose turn it is
  int num_threads_ = 0;
  Launch launch_;
  std::string kernel_;
  Body body_;
  const void* parameters_;
  std::unique_ptr<char[]> dynamic_;
  std::string finding_;  // of the thread that failed
  Order order_ = Order::kAscending;
  std::mt19937_64 random_;
};

Scheduler& scheduler() {
  static Scheduler scheduler;
  return scheduler;
}

void Scheduler::run(const Launch& launch, std::string_view kernel, Body body, const void* parameters,
                    size_t parameters_bytes) {
  launch_ = launch, kernel_ = without_namespaces(kernel), body_ = body, parameters_ = parameters, at_work_ = -1;
  refuse_invalid();
  gridDim = launch.grid, blockDim = launch.block;
  num_threads_ = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  dynamic_.reset(launch.shared_bytes > 0 ? new char[launch.shared_bytes] : nullptr);
  checker::begin_launch({parameters, parameters_bytes}, {dynamic_.get(), launch.shared_bytes}, &stacks_);
  for (unsigned block : in_order(launch.grid.x * launch.grid.y * launch.grid.z)) run_block(block);
}

void Scheduler::refuse_invalid() const {
  const auto& [grid, block, shared_bytes, place] = launch_;
  std::string wrong;
  if (block.x * block.y * block.z == 0 || grid.x * grid.y * grid.z == 0) wrong = "nothing to launch";
  if (block.x * block.y * block.z > Stacks::kCount) wrong = "more than 1024 threads in a block";
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) wrong = "more blocks than a grid can have";
  if (shared_bytes > kSharedBytes) wrong = std::to_string(shared_bytes) + " bytes of shared memory, more than 48 KB";
  if (wrong.empty()) return;
  throw std::runtime_error("invalid launch: " + wrong + ": grid " + text(grid) + ", block " + text(block) + ", at " +
                           text(place) + ", kernel " + kernel_);
}

void Scheduler::run_block(unsigned number) {
  blockIdx = index_of(number, launch_.grid);
  checker::begin_block();
  for (int i = 0; i < num_threads_; ++i) {
    threads_[i].fiber.start(stacks_.bottom(i), stacks_.bottom(i + 1), entry);
    threads_[i].state = Thread::State::kReady;
  }
  const auto returned = [this](int count) {
    const auto is_returned = [](const Thread& thread) { return thread.state == Thread::State::kReturned; };
    return std::all_of(threads_.begin(), threads_.begin() + count, is_returned);
  };
  while (!returned(num_threads_)) {
    bool moved = false;
    for (unsigned warp : in_order((num_threads_ + warpSize - 1) / warpSize)) moved |= run_warp(static_cast<int>(warp));
    if (!release_barrier() && !moved) report_deadlock();
  }
}

// Until its lanes wait for other warps, or one turn of each in random order.
bool Scheduler::run_warp(int warp) {
  bool moved = false, moving = true;
  while (moving) {
    moving = false;
    for (unsigned lane : in_order(lanes_of(warp))) {
      const int number = warp * warpSize + static_cast<int>(lane);
      if (threads_[number].state != Thread::State::kReady) continue;
      take_turn(number);
      moving = true;
    }
    moving |= release_warp(warp);
    moved |= moving;
    if (order_ == Order::kRandom) break;
  }
  return moved;
}

void Scheduler::take_turn(int number) {
  at_work_ = number;
  threadIdx = index_of(static_cast<unsigned>(number), launch_.block);
  checker::begin_turn(number);
  home_.switch_to(threads_[number].fiber);
  checker::end_turn();
  if (!finding_.empty()) throw std::runtime_error(with_context(std::exchange(finding_, {})));
}

void Scheduler::entry() {
  Scheduler& self = scheduler();
  self.body_(self.parameters_);
  Thread& thread = self.threads_[self.at_work_];
  thread.state = Thread::State::kReturned;
  thread.fiber.switch_to(self.home_);
}

uint64_t Scheduler::wait_for_warp(const Wait& wait) {
  const int warp = at_work_ / warpSize, lanes = lanes_of(warp);
  if ((wait.mask >> lane() & 1) == 0) fail("lane outside its mask: " + text(wait));
  if (lanes < warpSize && wait.mask >> lanes != 0) fail("mask with lanes that do not exist: " + text(wait));
  Thread& thread = threads_[at_work_];
  thread.wait = wait, thread.state = Thread::State::kInWarpCall;
  thread.fiber.switch_to(home_);
  return thread.received;
}

void Scheduler::wait_for_block(const Wait& wait) {
  Thread& thread = threads_[at_work_];
  thread.wait = wait, thread.state = Thread::State::kAtBarrier;
  thread.fiber.switch_to(home_);
}

bool Scheduler::release_warp(int warp) {
  const int first = warp * warpSize;
  bool released = false;
  for (int lane = 0; lane < lanes_of(warp); ++lane) {
    if (threads_[first + lane].state != Thread::State::kInWarpCall) continue;
    const Wait wait = threads_[first + lane].wait;
    bool complete = true;
    for (int other = 0; other < lanes_of(warp); ++other) {
      if ((wait.mask >> other & 1) == 0) continue;
      const Thread& thread = threads_[first + other];
      at_work_ = first + lane;
      if (thread.state == Thread::State::kReturned) {
        throw std::runtime_error(with_context("early exit: lane " + std::to_string(other) + " has returned, and " +
                                              text(wait) + " waits for it"));
      }
      if (thread.state != Thread::State::kInWarpCall) {
        complete = false;
      } else if (!same_place(thread.wait, wait) || thread.wait.mask != wait.mask) {
        throw std::runtime_error(with_context("divergent warp call: " + text(wait) + ", but lane " +
                                              std::to_string(other) + " is in " + text(thread.wait) +
                                              (same_place(thread.wait, wait) ? " with another mask" : "")));
      }
    }
    if (complete) release(first, wait), released = true;
  }
  return released;
}

void Scheduler::release(int first, const Wait& wait) {
  uint64_t ballot = 0;
  for (int lane = 0; lane < warpSize; ++lane) {
    if (wait.mask >> lane & 1) ballot |= static_cast<uint64_t>(threads_[first + lane].wait.brought != 0) << lane;
  }
  for (int lane = 0; lane < warpSize; ++lane) {
    if ((wait.mask >> lane & 1) == 0) continue;
    Thread& thread = threads_[first + lane];
    const int source = thread.wait.source;
    if (wait.call < Call::kBallot && (wait.mask >> source & 1) == 0) {
      at_work_ = first + lane;
      throw std::runtime_error(with_context("lane outside the mask: " + text(wait) + " reads lane " +
                                            std::to_string(source)));
    }
    thread.received = wait.call == Call::kBallot ? ballot : threads_[first + source].wait.brought;
    thread.state = Thread::State::kReady;
  }
  if (wait.call == Call::kSyncWarp && wait.mask == 0xffffffffu) checker::order_warp(first / warpSize);
}

bool Scheduler::release_barrier() {
  int waiting = -1, returned = -1, elsewhere = -1;
  for (int i = 0; i < num_threads_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == Thread::State::kReturned) {
      returned = i;
    } else if (thread.state != Thread::State::kAtBarrier) {
      return false;
    } else if (waiting < 0) {
      waiting = i;
    } else if (!same_place(thread.wait, threads_[waiting].wait)) {
      elsewhere = i;
    }
  }
  if (waiting < 0) return false;
  const std::string who = text(threads_[waiting].wait);
  at_work_ = waiting;
  if (returned >= 0) {
    const std::string gone = "early exit: thread " + std::to_string(returned) + " has returned, and ";
    throw std::runtime_error(with_context(gone + who + " waits for it"));
  }
  if (elsewhere >= 0) {
    throw std::runtime_error(with_context("divergent barrier: " + who + ", but thread " + std::to_string(elsewhere) +
                                          " is in " + text(threads_[elsewhere].wait)));
  }
  for (int i = 0; i < num_threads_; ++i) threads_[i].state = Thread::State::kReady;
  checker::order_block();
  return true;
}

void Scheduler::report_deadlock() const {
  std::string waits;
  const Wait* last = nullptr;
  for (int i = 0; i < num_threads_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == Thread::State::kReturned || (last != nullptr && same_place(*last, thread.wait))) continue;
    waits += (last == nullptr ? "" : "; ") + ("thread " + std::to_string(i)) + " in " + text(thread.wait);
    last = &thread.wait;
  }
  throw std::runtime_error(with_context("deadlock: " + waits));
}

std::vector<unsigned> Scheduler::in_order(unsigned count) {
  std::vector<unsigned> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (order_ == Order::kDescending) std::reverse(numbers.begin(), numbers.end());
  if (order_ == Order::kRandom) std::shuffle(numbers.begin(), numbers.end(), random_);
  return numbers;
}

dim3 Scheduler::index_of(unsigned number, const dim3& extent) const {
  return {number % extent.x, number / extent.x % extent.y, number / extent.x / extent.y};
}

std::string Scheduler::with_context(const std::string& finding) const {
  return finding + ", block " + text(blockIdx) + ", thread " +
         text(index_of(static_cast<unsigned>(at_work_), launch_.block)) + ", kernel " + kernel_;
}

void Scheduler::fail(const std::string& finding) {
  finding_ = finding;
  threads_[at_work_].fiber.switch_to(home_);
  __builtin_unreachable();
}

}  // namespace

std::string text(Place place) {
  const std::string_view file = place.file;
  return std::string(file.substr(file.rfind('/') + 1)) + ":" + std::to_string(place.line);
}

void run(const Launch& launch, std::string_view kernel, Body body, const void* parameters, size_t parameters_bytes) {
  static std::mutex one_at_a_time;
  const std::lock_guard guard(one_at_a_time);
  scheduler().run(launch, kernel, body, parameters, parameters_bytes);
}

uint64_t meet_warp(Call call, unsigned mask, uint64_t brought, int source, Place place) {
  return scheduler().wait_for_warp({call, mask, brought, source, place});
}

void meet_block(Place place) { scheduler().wait_for_block({Call::kSyncThreads, 0, 0, 0, place}); }

int lane() { return scheduler().lane(); }

void* dynamic_shared_memory() { return scheduler().dynamic_shared_memory(); }

int num_multiprocessors() { return multiprocessors; }

void fail(const std::string& finding) { scheduler().fail(finding); }

}  // namespace emulator

void emulator_set_order(int order, unsigned long long seed) {
  emulator::scheduler().set_order(static_cast<emulator::Order>(order), seed);
}

void emulator_set_multiprocessors(int number) { emulator::multiprocessors = number; }
