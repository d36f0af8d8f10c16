// Memory by owner: the sums of GET /v1/loads as a bar, and a thin one for each other store.

import { $, bytes, el, num, plural, span } from "./parts.js";

const MOST_PINS = 8; // that are listed
const OWNERS = [
	["requests", "c-decode", "owned by requests, or locked by them in the prefix cache"],
	["cached", "c-cached", "kept for prompts that begin alike, until memory is needed"],
	["pinned", "c-pinned", "kept for sessions and pins"],
	["out of use", "c-bad", "their owner was not clear"],
	["free", "c-free", "free"],
];

// Tokens of each owner, in the order of OWNERS.
function owners(stats) {
	const out = stats.kv_quarantined || 0;
	const taken = stats.kv_used + stats.kv_evictable + stats.kv_held + out;
	return [stats.kv_used, stats.kv_evictable, stats.kv_held, out, Math.max(stats.kv_tokens - taken, 0)];
}

export class Memory {
	constructor() {
		this.pool = el("div", "pool");
		this.pool.setAttribute("role", "img");
		this.legend = el("ul", "legend memory-legend");
		this.parts = OWNERS.map(([name, kind, title]) => {
			const part = this.pool.appendChild(el("i", kind));
			part.title = title;
			const line = el("li", kind, name + " ");
			line.title = title;
			const count = line.appendChild(el("b"));
			this.legend.append(line);
			return { part, count, line };
		});
		this.meters = el("div", "meters");
		this.lines = new Map();
		this.pinned = el("ul", "pins");
		this.pinned.setAttribute("aria-label", "Pinned prompts");
		$("memory").append(this.pool, this.legend, this.meters, this.pinned);
	}

	show(stats, pins) {
		const counts = owners(stats);
		const total = Math.max(counts.reduce((sum, count) => sum + count, 0), 1);
		counts.forEach((count, i) => {
			const { part, count: told, line } = this.parts[i];
			part.style.setProperty("--p", (count / total).toFixed(4));
			told.textContent = num(count);
			line.hidden = i === 3 && !count;
		});
		$("memory-text").textContent = `KV of ${num(stats.kv_tokens)} tokens · ${Math.round((100 * stats.kv_used) / Math.max(stats.kv_tokens, 1))} % in use`;
		this.pool.setAttribute("aria-label", OWNERS.map(([name], i) => `${name} ${num(counts[i])}`).join(", ") + " tokens");
		this.others(stats);
		this.pins(pins);
	}

	others(stats) {
		if (stats.kv_window_tokens) {
			const used = stats.kv_window_used + stats.kv_window_evictable;
			this.meter("windows", `layers with windows: ${num(stats.kv_window_used)} used, ${num(stats.kv_window_evictable)} cached`, used / stats.kv_window_tokens, "c-decode");
		}
		if (stats.state_slots) {
			const used = stats.state_slots_used + stats.state_slots_evictable;
			this.meter("states", `states: ${num(stats.state_slots_used)} used, ${num(stats.state_slots_evictable)} snapshots of ${num(stats.state_slots)}`, used / stats.state_slots, "c-decode");
		}
		if (stats.disk_bytes || stats.total_disk_written_bytes) {
			this.meter("disk", `on disk: ${bytes(stats.disk_bytes)} in ${num(stats.disk_blocks)} blocks · ${num(stats.total_disk_hit_tokens)} tokens found there · ${num(stats.total_disk_faults)} faults`, null, "c-cached");
		}
		if (stats.adapter_slots) {
			this.meter("adapters", `adapters: ${num(stats.adapter_slots_used)} run of ${num(stats.num_adapters)} loaded`, stats.adapter_slots_used / stats.adapter_slots, "c-decode");
		}
		if (stats.total_encoder_runs) {
			this.meter("encoder", `pictures, videos, sounds: ${num(stats.encoder_tokens)} tokens kept · encoded ${num(stats.total_encoder_runs)}, found ${num(stats.total_encoder_hits)}`, null, "c-cached");
		}
		if (stats.num_sessions) this.meter("sessions", `sessions: ${num(stats.num_sessions)} open`, null, "c-pinned");
		if (stats.total_grammars) {
			this.meter("grammars", `grammars: ${num(stats.total_grammars)} asked for, ${num(stats.total_grammar_hits)} found compiled, ${num(stats.num_grammar_queue)} being compiled`, null, "c-warn");
		}
		for (const source of ["prediction", "tree", "draft", "ngram"]) {
			const guessed = stats["total_drafts_" + source];
			const right = stats["total_accepted_" + source];
			if (guessed) this.meter("guess-" + source, `guesses (${source}): ${num(right)} of ${num(guessed)} right`, right / guessed, "c-decode");
		}
	}

	// Each by its name, the one that was used last at the top.
	pins(pins) {
		this.pinned.hidden = !pins.length;
		const lines = pins.slice(-MOST_PINS).reverse().map((pin) => {
			const line = el("li", pin.state === "firm" ? "c-pinned" : "c-warn", pin.name);
			const words = [`${num(pin.tokens)} tokens`, pin.tenant, `used ${plural(pin.uses, "time")}`, `for ${span(pin.expires_in_s)}`];
			if (pin.state !== "firm") words.push(pin.state);
			line.append(el("small", "", words.filter(Boolean).join(" · ")));
			return line;
		});
		this.pinned.replaceChildren(...lines);
	}

	meter(name, words, share, kind) {
		let line = this.lines.get(name);
		if (!line) {
			line = { box: el("div"), words: el("span"), pool: el("div", "pool") };
			line.part = line.pool.appendChild(el("i", kind));
			line.box.append(line.words);
			if (share !== null) line.box.append(line.pool);
			this.meters.append(line.box);
			this.lines.set(name, line);
		}
		line.words.textContent = words;
		if (share !== null) line.part.style.setProperty("--p", Math.min(share, 1).toFixed(4));
	}
}
