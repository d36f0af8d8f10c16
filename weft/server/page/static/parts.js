// Shared by all parts. Texts of clients and models become text here, never markup.

export const $ = (id) => document.getElementById(id);

// Whether the page shows a recording.
export const isFilm = document.documentElement.dataset.mode === "film";

// Whether a key belongs to an input method, which chooses words by it; Safari says so only by the code.
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

export const on = (id, event, act) => $(id).addEventListener(event, act);

// Only changed text is read out by screen readers and laid out again.
export function put(node, words) {
	if (node.textContent !== words) node.textContent = words;
}

export const tell = (id, words) => put($(id), words);

export function el(tag, kind = "", ...children) {
	const made = document.createElement(tag);
	made.className = kind;
	made.append(...children);
	return made;
}

// In a form, it does not send it.
export function button(text, act, kind) {
	const made = Object.assign(el("button", kind, text), { type: "button" });
	made.addEventListener("click", act);
	return made;
}

// A button that copies what `text()` returns.
export function copier(words, text) {
	const made = button(words, async () => {
		const isDone = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
		made.textContent = isDone ? "Copied" : "Not allowed";
	});
	return made;
}

// A bar with parts of these colours and shares: one box, without new layout.
export function bar(box, shares) {
	let end = 0;
	const parts = Object.entries(shares).map(([colour, share]) => `var(--${colour}) ${percent(end)} ${percent((end += share))}`);
	box.style.backgroundImage = `linear-gradient(var(--turn, 90deg), ${parts}, #0000 0)`;
	return box;
}

const percent = (share) => (100 * share).toFixed(2) + "%";

// A list with an element per name, also for names that come several times; removes those of absent names.
export function listOf(box, make, fill, none) {
	const shown = new Map();
	return (names) => {
		box.querySelector(".none")?.remove();
		const kept = new Set();
		const times = new Map();
		names.forEach((name, i) => {
			const time = times.get(name) || 0;
			times.set(name, time + 1);
			const key = time ? `${name}\n${time}` : name;
			kept.add(key);
			if (!shown.has(key)) {
				shown.set(key, make(name));
				box.append(shown.get(key));
			}
			fill(shown.get(key), i, name);
		});
		for (const [name, one] of shown) {
			if (kept.has(name)) continue;
			one.remove();
			shown.delete(name);
		}
		if (none && !names.length) box.append(el("li", "none", none));
	};
}

export const join = (...words) => words.filter(Boolean).join(" · ");

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const num = (value) => whole.format(value);

export function short(value) {
	const isLong = value >= 1e4;
	return value.toLocaleString("en", { notation: isLong ? "compact" : "standard", maximumFractionDigits: isLong || value < 1e3 ? 1 : 0 });
}

export function span(seconds) {
	if (seconds < 10) return seconds.toFixed(1) + " s";
	if (seconds < 120) return seconds.toFixed(0) + " s";
	if (seconds < 7200) return Math.floor(seconds / 60) + " min";
	return Math.floor(seconds / 3600) + " h " + Math.floor((seconds % 3600) / 60) + " min";
}

// Why a prompt was not cached, with its price and the texts at which it parts, as far as they are told.
export function because({ words, missed_tokens: missed, missed_s: seconds, ours_text: ours, theirs_text: theirs }) {
	if (!missed) return words;
	const price = Number.isFinite(seconds) ? ` (${plural(missed, "token")}, ${seconds.toFixed(2)} s)` : ` (${plural(missed, "token")})`;
	return words + price + (ours && theirs ? `: here “${cut(ours)}”, there “${cut(theirs)}”` : "");
}

const cut = (text) => text.length > 24 ? text.slice(0, 24) + "…" : text;

export const sum = (counts) => counts.reduce((all, count) => all + count, 0);

export const plural = (count, word) => `${num(count)} ${word}${count === 1 ? "" : "s"}`;

// A user always has the same hue.
export function hue(name) {
	return [...name].reduce((sum, sign) => (sum * 31 + sign.codePointAt() * 47) % 360, 7);
}

// The share of the KV memory that requests use.
export const used = (stats) => stats.kv_used / Math.max(stats.kv_tokens, 1);

export const keyOf = (kind) => sessionStorage.getItem("weft-" + kind) || "";

export const keepKey = (kind, input) => sessionStorage.setItem("weft-" + kind, input.value.trim());

export function headers(kind) {
	const key = keyOf(kind) || keyOf(kind === "admin" ? "user" : "admin");
	return key ? { authorization: "Bearer " + key } : {};
}

// Throws for an error answer, with the server's message.
export async function check(answer) {
	if (answer.ok) return answer;
	const body = await answer.json().catch(() => null);
	throw new Error(body?.error?.message || `the server answered ${answer.status}`);
}

let chosen = ""; // one of several models; "": the server has one

export const choose = (name) => { chosen = name; };

// A path for the chosen model.
export const about = (path) => chosen ? `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(chosen)}` : path;

// A request with a body is a POST.
export async function read(path, kind, body, more) {
	const asked = { "content-type": "application/json", ...headers(kind), ...more };
	const answer = await check(await fetch(about(path), { method: body ? "POST" : "GET", headers: asked, body: body && JSON.stringify(body) }));
	return answer.json();
}
