/* Large blocks of malloc on recycled pages.

   A page that leaves a process costs a fault and a fresh page of zeros when memory is asked for again; a page
   that stays in a hole of the wrong size is lost to the next tensor. This pool avoids both: freed blocks keep
   their pages, and where no free block is large enough, pages of several are moved together (mremap changes
   page tables; no byte is copied). So resident memory grows only when everything that was freed is in use
   again: its peak is the largest sum of live blocks, as if each were unmapped when freed.

   Preloaded into a process (LD_PRELOAD) it takes aligned allocations of at least POOL_LEAST bytes, which is
   what torch asks for; all others go on to the allocator behind it.

   Smaller aligned blocks are kept by the thread that frees them, a few of each size, and serve its next ones:
   glibc takes the lock of an arena for each aligned block, and attention's backward alone asks for tens of
   thousands of scratch blocks in every thread. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define POOL_LEAST (128UL * 1024)
#define BINS 256
#define SCANNED 32          /* free blocks of one bin that are looked at for a closer fit */
#define MOST_SEGMENTS 16384 /* of mappings that a process may have, 65530 by default */
#define LEAST_MOVED 32      /* pages; fewer are given back: faults on them cost less than ever smaller mappings */

/* A run of pages in one mapping of the kernel: what one mremap may move. Neighbours with the same
   `mapping` are in the same one. */
typedef struct segment {
    size_t pages, mapping;
    struct segment *next;
} segment;

typedef struct block {
    char *start;
    size_t pages;
    int free;
    segment *first, *last;
    struct block *previous_free, *next_free; /* in its bin */
    struct block *next_by_start, *next_by_end; /* in the hash tables */
} block;

#define KEPT_ALIGNMENT 64UL
#define KEPT_LEAST 64UL
#define KEPT_CLASSES 44 /* four to each power of two from KEPT_LEAST to POOL_LEAST */
#define KEPT_EACH 16
#define KEPT_BYTES (256UL * 1024) /* of one thread */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*next_posix_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);
static void *(*next_realloc)(void *, size_t);
static size_t (*next_usable_size)(void *);

static block *bins[BINS];
static uint64_t filled[BINS / 64];
static block **by_start, **by_end; /* tables of `buckets` chains, both of all blocks */
static size_t buckets, blocks, segments, mappings, live_pages, free_pages, moves;
static block *spare_blocks;
static segment *spare_segments;

/* records: cut from mappings of their own, never given back, so that no allocator is entered from here */

static void *fresh_records(size_t bytes) {
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

static block *new_block(char *start, size_t pages) {
    if (!spare_blocks) {
        size_t count = 16 * PAGE / sizeof(block);
        block *made = fresh_records(16 * PAGE);
        if (!made) return NULL;
        for (size_t i = 0; i < count; i++) made[i].next_free = i + 1 < count ? &made[i + 1] : NULL;
        spare_blocks = made;
    }
    block *taken = spare_blocks;
    spare_blocks = taken->next_free;
    memset(taken, 0, sizeof *taken);
    taken->start = start;
    taken->pages = pages;
    return taken;
}

static segment *new_segment(size_t pages, size_t mapping) {
    if (!spare_segments) {
        size_t count = 4 * PAGE / sizeof(segment);
        segment *made = fresh_records(4 * PAGE);
        if (!made) return NULL;
        for (size_t i = 0; i < count; i++) made[i].next = i + 1 < count ? &made[i + 1] : NULL;
        spare_segments = made;
    }
    segment *taken = spare_segments;
    spare_segments = taken->next;
    taken->pages = pages;
    taken->mapping = mapping;
    taken->next = NULL;
    segments++;
    return taken;
}

static void drop_segment(segment *gone) {
    gone->next = spare_segments;
    spare_segments = gone;
    segments--;
}

/* tables */

static size_t bucket(const char *address) {
    return (((uintptr_t)address / PAGE) * 0x9E3779B97F4A7C15UL >> 20) & (buckets - 1);
}

static void enter(block *one) {
    size_t start = bucket(one->start), end = bucket(one->start + one->pages * PAGE);
    one->next_by_start = by_start[start];
    by_start[start] = one;
    one->next_by_end = by_end[end];
    by_end[end] = one;
    blocks++;
}

static void leave(block *one) {
    block **at = &by_start[bucket(one->start)];
    while (*at != one) at = &(*at)->next_by_start;
    *at = one->next_by_start;
    at = &by_end[bucket(one->start + one->pages * PAGE)];
    while (*at != one) at = &(*at)->next_by_end;
    *at = one->next_by_end;
    blocks--;
}

static block *starting_at(const char *start) {
    if (!buckets) return NULL;
    block *one = by_start[bucket(start)];
    while (one && one->start != start) one = one->next_by_start;
    return one;
}

static block *ending_at(const char *end) {
    block *one = by_end[bucket(end)];
    while (one && one->start + one->pages * PAGE != end) one = one->next_by_end;
    return one;
}

/* bins: four to each power of two */

static int bin_of(size_t pages) {
    int log = 63 - __builtin_clzl(pages);
    int quarter = log < 2 ? 0 : (int)(pages >> (log - 2)) & 3;
    return log * 4 + quarter;
}

static void put_in_bin(block *one) {
    int bin = bin_of(one->pages);
    one->free = 1;
    one->previous_free = NULL;
    one->next_free = bins[bin];
    if (bins[bin]) bins[bin]->previous_free = one;
    bins[bin] = one;
    filled[bin / 64] |= 1UL << (bin % 64);
    free_pages += one->pages;
}

static void take_from_bin(block *one) {
    int bin = bin_of(one->pages);
    if (one->next_free) one->next_free->previous_free = one->previous_free;
    if (one->previous_free) one->previous_free->next_free = one->next_free;
    else bins[bin] = one->next_free;
    if (!bins[bin]) filled[bin / 64] &= ~(1UL << (bin % 64));
    one->free = 0;
    free_pages -= one->pages;
}

/* A free block of at least `pages`, the closest among those looked at; NULL: none is large enough. */
static block *best_fit(size_t pages) {
    block *best = NULL;
    int bin = bin_of(pages), looked = 0;
    for (block *one = bins[bin]; one && looked < SCANNED; one = one->next_free, looked++) {
        if (one->pages == pages) return one;
        if (one->pages > pages && (!best || one->pages < best->pages)) best = one;
    }
    for (bin++; !best && bin < BINS; bin++)
        if (filled[bin / 64] >> (bin % 64) & 1) best = bins[bin];
    return best;
}

static block *largest_free(void) {
    for (int bin = BINS - 1; bin >= 0; bin--)
        if (filled[bin / 64] >> (bin % 64) & 1) return bins[bin];
    return NULL;
}

/* Cuts `one` (in no bin) after `pages`; the rest becomes a block in no bin. 0: no record was to be had. */
static block *split(block *one, size_t pages) {
    block *rest = new_block(one->start + pages * PAGE, one->pages - pages);
    if (!rest) return NULL;
    segment *at = one->first;
    size_t before = 0;
    while (before + at->pages < pages) {
        before += at->pages;
        at = at->next;
    }
    size_t kept = pages - before;
    if (kept < at->pages) {
        segment *cut = new_segment(at->pages - kept, at->mapping);
        if (!cut) {
            rest->next_free = spare_blocks;
            spare_blocks = rest;
            return NULL;
        }
        cut->next = at->next;
        at->pages = kept;
        at->next = cut;
        if (one->last == at) one->last = cut;
    }
    leave(one);
    rest->first = at->next;
    rest->last = one->last;
    one->last = at;
    at->next = NULL;
    one->pages = pages;
    enter(one);
    enter(rest);
    return rest;
}

static void forget(block *one) {
    leave(one);
    for (segment *at = one->first; at;) {
        segment *next = at->next;
        drop_segment(at);
        at = next;
    }
    one->next_free = spare_blocks;
    spare_blocks = one;
}

/* Appends the segments of `second`, which follows `first` in memory, to those of `first`. */
static void join_segments(block *first, block *second) {
    segment *seam = second->first;
    if (first->last->mapping == seam->mapping) {
        first->last->pages += seam->pages;
        second->first = seam->next;
        if (!second->first) second->last = first->last;
        drop_segment(seam);
    }
    if (second->first) {
        first->last->next = second->first;
        first->last = second->last;
    }
}

/* Puts a block in no bin among the free ones, joined with free neighbours. */
static void make_free(block *one) {
    block *after = starting_at(one->start + one->pages * PAGE);
    if (after && after->free) {
        take_from_bin(after);
        leave(after);
        leave(one);
        join_segments(one, after);
        one->pages += after->pages;
        enter(one);
        after->next_free = spare_blocks;
        spare_blocks = after;
    }
    block *before = ending_at(one->start);
    if (before && before->free) {
        take_from_bin(before);
        leave(before);
        leave(one);
        join_segments(before, one);
        before->pages += one->pages;
        enter(before);
        one->next_free = spare_blocks;
        spare_blocks = one;
        one = before;
    }
    put_in_bin(one);
}

static void release_free(void) {
    for (int bin = 0; bin < BINS; bin++)
        while (bins[bin]) {
            block *one = bins[bin];
            take_from_bin(one);
            munmap(one->start, one->pages * PAGE);
            forget(one);
        }
}

/* Moves the pages of free blocks to `target`, until `pages` are there or none is left.
   The moved part's segments are appended to `made`. Returns pages moved. */
static size_t gather(block *made, char *target, size_t pages) {
    size_t moved = 0;
    block *source;
    while (moved < pages && (source = largest_free())) {
        take_from_bin(source);
        if (source->pages > pages - moved) {
            block *rest = split(source, pages - moved);
            if (!rest) {
                put_in_bin(source);
                break;
            }
            put_in_bin(rest);
        }
        char *from = source->start;
        segment *at = source->first;
        while (at) {
            size_t bytes = at->pages * PAGE;
            int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
            if (at->pages < LEAST_MOVED || mremap(from, bytes, bytes, flags, target + moved * PAGE) == MAP_FAILED)
                munmap(from, bytes); /* the target keeps its own, empty pages there */
            else
                moves++;
            at->mapping = ++mappings;
            from += bytes;
            moved += at->pages;
            at = at->next;
        }
        made->last ? (made->last->next = source->first) : (made->first = source->first);
        made->last = source->last;
        source->first = source->last = NULL;
        forget(source);
    }
    return moved;
}

static block *assemble(size_t pages) {
    char *start = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    block *made = new_block(start, pages);
    segment *own = new_segment(pages, ++mappings);
    if (!made || !own) {
        munmap(start, pages * PAGE);
        return NULL;
    }
    size_t moved = gather(made, start, pages);
    own->pages = pages - moved;
    if (!own->pages) drop_segment(own);
    else {
        made->last ? (made->last->next = own) : (made->first = own);
        made->last = own;
    }
    enter(made);
    return made;
}

static int start_tables(void) {
    if (buckets) return 1;
    size_t count = 1UL << 14;
    by_start = fresh_records(count * sizeof *by_start);
    by_end = fresh_records(count * sizeof *by_end);
    if (!by_start || !by_end) return 0;
    buckets = count;
    return 1;
}

static void *pool_take(size_t bytes) {
    size_t pages = (bytes + PAGE - 1) / PAGE;
    void *found = NULL;
    pthread_mutex_lock(&lock);
    if (start_tables()) {
        if (segments > MOST_SEGMENTS) release_free();
        block *one = best_fit(pages);
        if (one) {
            take_from_bin(one);
            block *rest = one->pages > pages ? split(one, pages) : NULL;
            if (rest) put_in_bin(rest);
        } else {
            one = assemble(pages);
        }
        if (one) {
            live_pages += one->pages;
            found = one->start;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Whether `address` was the pool's; it is free then. */
static int pool_give(void *address) {
    if ((uintptr_t)address % PAGE) return 0;
    pthread_mutex_lock(&lock);
    block *one = starting_at(address);
    int ours = one && !one->free;
    if (ours) {
        live_pages -= one->pages;
        make_free(one);
    }
    pthread_mutex_unlock(&lock);
    return ours;
}

static size_t pool_size(void *address) {
    if ((uintptr_t)address % PAGE) return 0;
    pthread_mutex_lock(&lock);
    block *one = starting_at(address);
    size_t bytes = one && !one->free ? one->pages * PAGE : 0;
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* small blocks of a thread; all come from the allocator behind, and any of them may go back there */

typedef struct kept_block {
    struct kept_block *next;
} kept_block;

typedef struct {
    kept_block *first[KEPT_CLASSES];
    unsigned char count[KEPT_CLASSES];
    unsigned char opened, closed;
    size_t bytes;
} kept_blocks;

static __thread kept_blocks kept __attribute__((tls_model("initial-exec")));
static pthread_key_t at_exit_of_thread;
static int has_key;

static size_t kept_size(int class) { return (4UL + class % 4) << (class / 4 + 4); }

/* The largest class that `bytes`, at least KEPT_LEAST, hold. */
static int kept_class(size_t bytes) {
    int log = 63 - __builtin_clzl(bytes);
    return (log - 6) * 4 + (int)(bytes >> (log - 2) & 3);
}

static int class_for(size_t bytes) {
    if (bytes <= KEPT_LEAST) return 0;
    int class = kept_class(bytes);
    return kept_size(class) < bytes ? class + 1 : class;
}

static void *take_kept(int class) {
    kept_block *found = kept.first[class];
    if (!found) return NULL;
    kept.first[class] = found->next;
    kept.count[class]--;
    kept.bytes -= kept_size(class);
    return found;
}

static void give_back_kept(void) {
    for (int class = 0; class < KEPT_CLASSES; class++)
        for (void *one; (one = take_kept(class));) next_free(one);
}

static void close_thread(void *unused) {
    (void)unused;
    kept.closed = 1; /* what is freed after this is not kept */
    give_back_kept();
}

/* Whether a block of the allocator behind is kept for this thread. */
static int keep(void *address) {
    if ((uintptr_t)address % KEPT_ALIGNMENT || kept.closed || !has_key) return 0;
    size_t bytes = next_usable_size(address);
    if (bytes < KEPT_LEAST || bytes >= POOL_LEAST) return 0;
    int class = kept_class(bytes);
    size_t size = kept_size(class);
    if (kept.count[class] >= KEPT_EACH || kept.bytes + size > KEPT_BYTES) return 0;
    if (!kept.opened) {
        if (pthread_setspecific(at_exit_of_thread, &kept)) return 0;
        kept.opened = 1;
    }
    kept_block *one = address;
    one->next = kept.first[class];
    kept.first[class] = one;
    kept.count[class]++;
    kept.bytes += size;
    return 1;
}

/* the allocator's interface */

static void find_next(void) {
    next_posix_memalign = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    next_realloc = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
    next_usable_size = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
}

static pthread_once_t found_next = PTHREAD_ONCE_INIT;

__attribute__((constructor)) static void start(void) {
    pthread_once(&found_next, find_next);
    has_key = !pthread_key_create(&at_exit_of_thread, close_thread);
    unsetenv("LD_PRELOAD"); /* for this process alone, not for its children */
}

int posix_memalign(void **target, size_t alignment, size_t bytes) {
    if (bytes >= POOL_LEAST && alignment <= PAGE) {
        void *found = pool_take(bytes);
        if (found) {
            *target = found;
            return 0;
        }
    }
    pthread_once(&found_next, find_next);
    int usual = alignment >= sizeof(void *) && alignment <= KEPT_ALIGNMENT && !(alignment & (alignment - 1));
    if (usual && bytes && bytes < POOL_LEAST) {
        int class = class_for(bytes);
        void *found = class < KEPT_CLASSES ? take_kept(class) : NULL;
        if (found) {
            *target = found;
            return 0;
        }
        /* as long as its class, so that it serves all of that when it is kept */
        if (class < KEPT_CLASSES) bytes = kept_size(class);
        alignment = KEPT_ALIGNMENT;
    }
    return next_posix_memalign(target, alignment, bytes);
}

void free(void *address) {
    if (!address) return;
    int before = errno;
    if (!pool_give(address)) {
        pthread_once(&found_next, find_next);
        if (!keep(address)) next_free(address);
    }
    errno = before;
}

void *realloc(void *address, size_t bytes) {
    size_t held = address ? pool_size(address) : 0;
    pthread_once(&found_next, find_next);
    if (!held) return next_realloc(address, bytes);
    void *made = bytes ? malloc(bytes) : NULL;
    if (made) memcpy(made, address, held < bytes ? held : bytes);
    if (made || !bytes) free(address);
    return made;
}

size_t malloc_usable_size(void *address) {
    size_t held = address ? pool_size(address) : 0;
    if (held) return held;
    pthread_once(&found_next, find_next);
    return next_usable_size(address);
}

/* for the process that has it: see stages/region/memory.py */

void stages_pool_release(void) {
    give_back_kept(); /* of this thread */
    pthread_mutex_lock(&lock);
    release_free();
    pthread_mutex_unlock(&lock);
}

size_t stages_pool_kept_bytes(void) { return kept.bytes; } /* of this thread */
size_t stages_pool_live_bytes(void) { return live_pages * PAGE; }
size_t stages_pool_free_bytes(void) { return free_pages * PAGE; }
size_t stages_pool_segments(void) { return segments; }
size_t stages_pool_moves(void) { return moves; }
