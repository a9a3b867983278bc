/* A thread pool: threads sleep between calls, and spin briefly before they sleep. */

#include "common.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SPINS 4000      /* about 50 microseconds: longer than the gap between two steps of a small model */

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

/* A thread's share of the current job. The counters alternate: the other one is of the previous or the next job. */
typedef struct {
    _Alignas(64) atomic_long taken[2];  /* number of its pieces that a thread has claimed */
    int jobs;                           /* number of jobs begun */
} Part;

struct Team {
    int threads;
    atomic_int arrived;
    atomic_int round;
    Part *parts;                        /* of each thread; NULL if threads never synchronize */
};

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;   /* locked during a call */
static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER;
static atomic_int call;         /* number of the current call */
static atomic_int busy;         /* number of helpers that have not finished it */
static int helpers;             /* number of threads, without the caller */
static int born[MAX_THREADS]; /* `call` at the creation of each */
static pid_t home;              /* their process: a forked child has none of them */
static Part parts[MAX_THREADS];
static Team team = {.parts = parts};
static Work work;
static void *argument;

int team_size(const Team *t) { return t->threads; }

void wait_for_all(Team *t)
{
    if (t->threads == 1)
        return;
    int round = atomic_load(&t->round);
    if (atomic_fetch_add(&t->arrived, 1) == t->threads - 1) {
        atomic_store(&t->arrived, 0);
        atomic_fetch_add(&t->round, 1);
        return;
    }
    for (int64_t i = 0; atomic_load_explicit(&t->round, memory_order_acquire) == round; i++)
        if (i < SPINS)
            PAUSE();
        else
            sched_yield();
}

Job begin_job(Team *t, int thread, int64_t count)
{
    Job job = {.team = t, .count = count, .thread = thread};
    if (t && t->parts) {
        Part *own = t->parts + thread;
        job.parity = own->jobs++ & 1;
        atomic_store_explicit(&own->taken[!job.parity], 0, memory_order_relaxed);   /* read after the next barrier */
    }
    return job;
}

int64_t take_piece(Job *job)
{
    Team *t = job->team;
    int threads = t ? t->threads : 1, shared = t && t->parts;
    for (; job->asked < threads; job->asked++) {
        int owner = (job->thread + job->asked) % threads;
        int64_t first, end;
        share(job->count, owner, threads, &first, &end);
        first += shared ? take_next(&t->parts[owner].taken[job->parity]) : job->own++;
        if (first < end)
            return first;
        if (!shared)
            break;
    }
    return -1;
}

static void *help(void *number)
{
    int thread = (int)(intptr_t)number, seen = born[thread];
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load_explicit(&call, memory_order_acquire) == seen; i++)
            PAUSE();
        if (atomic_load_explicit(&call, memory_order_acquire) == seen) {
            pthread_mutex_lock(&door);
            while (atomic_load(&call) == seen)
                pthread_cond_wait(&bell, &door);
            pthread_mutex_unlock(&door);
        }
        seen = atomic_load(&call);
        if (thread < team.threads)
            work(&team, thread, argument);
        atomic_fetch_sub(&busy, 1);
    }
    return NULL;
}

/* Starts a helper, with all signals blocked: only the interpreter's own threads may handle them. */
static int add_helper(void)
{
    pthread_t made;
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    born[helpers + 1] = atomic_load(&call);
    int failed = pthread_create(&made, &attributes, help, (void *)(intptr_t)(helpers + 1));
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    helpers += !failed;
    return !failed;
}

/* Starts missing helpers; returns the number of threads that can be used, with the caller. */
static int gather(int threads)
{
    if (home != getpid()) {
        home = getpid();
        helpers = 0;
        atomic_store(&call, 0);
        door = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* their state refers to the parent's helpers */
        bell = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    }
    while (helpers < threads - 1 && add_helper())
        ;
    return helpers + 1 < threads ? helpers + 1 : threads;
}

void run_team(int threads, Work wanted, void *given)
{
    Team alone = {.threads = 1};
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    if (threads <= 1 || pthread_mutex_trylock(&owner)) {
        wanted(&alone, 0, given);
        return;
    }
    threads = gather(threads);
    team.threads = threads;
    for (int i = 0; i < threads; i++) {
        parts[i].jobs = 0;
        atomic_store(&parts[i].taken[0], 0);
        atomic_store(&parts[i].taken[1], 0);
    }
    work = wanted;
    argument = given;
    atomic_store(&busy, helpers);
    pthread_mutex_lock(&door);
    atomic_fetch_add(&call, 1);
    pthread_cond_broadcast(&bell);
    pthread_mutex_unlock(&door);
    wanted(&team, 0, given);
    for (int64_t i = 0; atomic_load_explicit(&busy, memory_order_acquire); i++)
        if (i < SPINS)
            PAUSE();
        else
            sched_yield();
    pthread_mutex_unlock(&owner);
}

/* ---- PyTorch's own threads -------------------------------------------------------------------- */

typedef struct {
    Work work;
    void *argument;
    Team team;
    atomic_long counter;
} Pieces;

static void (*borrowed)(void (*)(void *), void *, unsigned, unsigned);
static pid_t lender; /* the process of those threads: in a forked child, GNU's library would wait for them forever */

/* Runs pieces on PyTorch's threads from now on. `parallel`: GOMP_parallel of the OpenMP library it has loaded. */
void etude_borrow_threads(void *parallel)
{
    borrowed = parallel;
    lender = getpid();
}

static void take_pieces(void *given)
{
    Pieces *pieces = given;
    for (int64_t i; (i = take_next(&pieces->counter)) < pieces->team.threads;)
        pieces->work(&pieces->team, (int)i, pieces->argument);
}

void run_pieces(int threads, Work work, void *argument)
{
    if (threads <= 1 || !borrowed || lender != getpid()) {
        run_team(threads, work, argument);
        return;
    }
    Pieces pieces = {.work = work, .argument = argument, .team = {.threads = threads}};
    atomic_init(&pieces.counter, 0);
    borrowed(take_pieces, &pieces, (unsigned)threads, 0);
}
