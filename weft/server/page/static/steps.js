// One bar a step: its height is its time, its colours what it computed. A slider for the keyboard
// and for screen readers; in a recording it shows where the picture is.

import { $, clear, colour, isCalm, num, plural } from "./parts.js";

export const MODES = ["prompts", "decoding", "both", "layers of prompts", "guesses"];
const KEPT = 1200;
const WIDTH = 5; // of a bar with its gap
const ARRIVE_MS = 220; // in which the bars of a picture come in

export class Steps {
	constructor(pick = null) {
		this.strip = $("steps");
		this.canvas = $("steps-canvas");
		this.tip = $("steps-tip");
		this.pick = pick; // called with a step's number
		this.list = [];
		this.shown = 0; // bars that have come in; a fraction of the next one
		this.top = 1; // ms of the highest bar, smoothed
		this.at = -1; // index of the chosen one
		this.strip.addEventListener("pointermove", (event) => this.point(event));
		this.strip.addEventListener("pointerleave", () => this.choose(-1));
		this.strip.addEventListener("click", (event) => { this.point(event); this.take(); });
		this.strip.addEventListener("keydown", (event) => this.key(event));
		this.strip.addEventListener("blur", () => this.choose(-1));
		new ResizeObserver(() => this.draw()).observe(this.strip);
	}

	clear() {
		this.list = [];
		this.shown = 0;
		this.choose(-1);
	}

	add(columns) {
		const numbers = columns.number;
		const last = this.list.length ? this.list[this.list.length - 1].number : -1;
		if (numbers.length && numbers[numbers.length - 1] < last) this.clear();
		for (let i = 0; i < numbers.length; i++) {
			if (this.list.length && numbers[i] <= this.list[this.list.length - 1].number) continue;
			this.list.push({
				number: numbers[i], mode: columns.mode[i], rows: columns.rows[i], prompts: columns.prompts[i],
				tokens: columns.tokens[i], waiting: columns.waiting[i], ms: columns.ms[i],
			});
		}
		const over = this.list.length - KEPT;
		if (over > 0) {
			this.list.splice(0, over);
			this.shown = Math.max(this.shown - over, 0);
			if (this.at >= 0) this.at = Math.max(this.at - over, 0);
		}
		this.tell();
		this.come();
	}

	tell() {
		const latest = this.list.slice(-200);
		if (!latest.length) {
			$("steps-text").textContent = "no step yet";
			return;
		}
		const times = latest.map((step) => step.ms).sort((a, b) => a - b);
		const last = latest[latest.length - 1];
		const half = times[times.length >> 1];
		const worst = times[times.length - 1];
		$("steps-text").textContent =
			`${num(last.number)} · median ${half.toFixed(1)} ms · longest ${worst.toFixed(1)} ms of the last ${latest.length}`;
		this.strip.setAttribute("aria-valuemin", this.list[0].number);
		this.strip.setAttribute("aria-valuemax", last.number);
		if (this.at < 0) this.say(last);
	}

	say(step) {
		this.strip.setAttribute("aria-valuenow", step.number);
		this.strip.setAttribute("aria-valuetext", this.words(step).replaceAll("\n", ", "));
	}

	words(step) {
		const rows = step.prompts && step.prompts < step.rows ? `, ${step.prompts} of them prompts` : "";
		return `step ${num(step.number)} · ${MODES[step.mode] || "mode " + step.mode}\n` +
			`${plural(step.rows, "row")}${rows}\n${plural(step.tokens, "token")} in ${step.ms.toFixed(2)} ms\n${num(step.waiting)} waiting`;
	}

	// ---- choosing one

	point(event) {
		const box = this.strip.getBoundingClientRect();
		const back = Math.floor((box.right - event.clientX) / WIDTH);
		this.choose(Math.floor(this.shown) - 1 - back);
	}

	key(event) {
		const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 };
		if (event.key === "Enter") this.take();
		if (!(event.key in moves) || !this.list.length) return;
		event.preventDefault();
		const from = this.at < 0 ? this.list.length - 1 : this.at;
		this.choose(Math.min(Math.max(from + moves[event.key], 0), this.list.length - 1));
	}

	choose(index) {
		this.at = index >= 0 && index < this.list.length ? index : -1;
		this.tip.hidden = this.at < 0;
		if (this.at >= 0) {
			const step = this.list[this.at];
			this.tip.textContent = this.words(step);
			this.say(step);
			const x = this.strip.clientWidth - (this.shown - this.at) * WIDTH;
			const most = this.strip.clientWidth - this.tip.offsetWidth - 6;
			this.tip.style.setProperty("--x", Math.max(Math.min(x + 10, most), 6) + "px");
		}
		this.draw();
	}

	take() {
		if (this.pick && this.at >= 0) this.pick(this.list[this.at].number);
	}

	// ---- drawing

	come() {
		if (isCalm() || document.hidden) {
			this.shown = this.list.length;
			this.draw();
			return;
		}
		// Who was far behind begins near the end.
		this.shown = Math.max(this.shown, this.list.length - 240);
		this.rate = Math.max((this.list.length - this.shown) / ARRIVE_MS, 1 / ARRIVE_MS);
		if (!this.frame) {
			this.last = performance.now();
			this.frame = requestAnimationFrame((now) => this.move(now));
		}
	}

	finish() {
		cancelAnimationFrame(this.frame);
		this.frame = 0;
		this.shown = this.list.length;
		this.draw();
	}

	move(now) {
		this.shown = Math.min(this.shown + this.rate * (now - this.last), this.list.length);
		this.last = now;
		this.draw();
		this.frame = this.shown < this.list.length ? requestAnimationFrame((next) => this.move(next)) : 0;
	}

	draw() {
		const [drawing, width, height] = clear(this.canvas);
		const end = Math.ceil(this.shown);
		const begin = Math.max(end - Math.ceil(width / WIDTH) - 1, 0);
		let highest = 1;
		for (let i = begin; i < end; i++) highest = Math.max(highest, this.list[i].ms);
		this.top = highest > this.top ? highest : this.top + (highest - this.top) * 0.05;
		const top = Math.max(this.top, 0.001);
		const prefill = colour("prefill");
		const decode = colour("decode");
		const guess = colour("cached");
		for (let i = begin; i < end; i++) {
			const step = this.list[i];
			const x = width - (this.shown - i) * WIDTH;
			// By the square root, so that long steps leave something of the short ones.
			const tall = Math.max(Math.min(Math.sqrt(step.ms / top), 1) * (height - 16), 2);
			const decoding = step.rows - step.prompts;
			// Of a mixed step each decoding row has a token, and the prompts the others.
			let share = step.prompts ? 1 : 0;
			if (step.prompts && decoding > 0 && step.tokens) share = (step.tokens - decoding) / step.tokens;
			drawing.fillStyle = step.mode === 4 ? guess : decode;
			drawing.fillRect(x, height - tall, WIDTH - 1.5, tall);
			if (share > 0) {
				drawing.fillStyle = prefill;
				drawing.fillRect(x, height - tall, WIDTH - 1.5, Math.max(tall * share, 2));
			}
			if (i === this.at) {
				drawing.strokeStyle = colour("ink");
				drawing.strokeRect(x - 0.75, height - tall - 1, WIDTH, tall + 2);
			}
		}
		drawing.fillStyle = colour("soft");
		drawing.font = "10px ui-sans-serif, system-ui, sans-serif";
		drawing.fillText(`${this.top.toFixed(this.top < 10 ? 1 : 0)} ms`, 6, 12);
	}
}
