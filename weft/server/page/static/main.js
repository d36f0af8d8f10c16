// Receives pictures of the live engine or of a recording; each part draws its own share.

import { $, isFilm, join, keepKey, num, on, plural, read, span, tell } from "./parts.js";
import * as chat from "./chat/chat.js";
import * as list from "./chat/list.js";
import * as engines from "./engine/engines.js";
import * as experts from "./engine/experts.js";
import * as feed from "./feed.js";
import * as keys from "./keys.js";
import * as views from "./views.js";
import * as figures from "./engine/figures.js";
import * as film from "./engine/film.js";
import * as memory from "./engine/memory.js";
import * as models from "./engine/models.js";
import * as rows from "./engine/rows.js";
import * as steps from "./engine/steps.js";
import * as story from "./engine/story.js";
import * as tree from "./engine/tree.js";

const WORDS_MS = 5000; // between two sentences for screen readers
const STALE_MS = 10_000; // without a picture: a server with a thousand viewers sends one in three seconds
const root = document.documentElement;

let hello = null;
let offset = 0; // of the server's clock, in seconds
let isPaused = false;
let saidAt = 0;
let seenAt = 0;
let work = []; // parts of the picture not drawn yet

// ---- pictures

function show(picture) {
	seenAt = performance.now();
	if (isPaused) return;
	live();
	if (engines.show(picture)) draw(picture);
}

engines.onChange(() => {
	steps.clear();
	figures.clear();
	draw(engines.shown());
});

function draw(picture) {
	const { stats } = picture;
	finish();
	work = [
		() => rows.show(picture),
		() => rows.wait(picture),
		() => { figures.show(picture); memory.show(picture); say(stats); },
		() => picture.tree && tree.show(picture.tree),
		() => steps.add(picture.steps, isFilm),
		experts.goOn,
	];
	if (isFilm) finish();
	else requestAnimationFrame(go);
}

// One frame per part, so that no frame takes long.
function go() {
	work.shift()?.();
	if (work.length) requestAnimationFrame(go);
}

function finish() {
	for (const part of work.splice(0)) part();
}

function say(stats) {
	const now = performance.now();
	if (now - saidAt < WORDS_MS) return;
	saidAt = now;
	tell("words", figures.words(stats));
}

// ---- state of the stream

function state(kind, words) {
	$("dot").className = kind;
	$("main").dataset.state = kind; // an old picture is dimmed
	tell("state", words);
}

function live() {
	if (!hello) return;
	state("live", `up ${span(Date.now() / 1000 + offset - hello.started_at)}`);
	$("gate").hidden = true;
}

// A server that sends nothing any more, and has not closed the connection.
function look() {
	const passed = performance.now() - seenAt;
	if ($("main").dataset.state === "live" && passed > STALE_MS) state("stale", `no picture for ${span(passed / 1000)}`);
	else if ($("main").dataset.state === "stale") tell("state", `no picture for ${span(passed / 1000)}`);
}

const handlers = {
	state,
	hello(facts) {
		hello = facts;
		offset = facts.now - Date.now() / 1000;
		introduce(facts);
		experts.introduce(facts);
		steps.clear();
		engines.clear();
	},
	picture: show,
	away({ why }) { state("away", why); },
	async refused(why) {
		state("wait", "engine not shown");
		$("gate").hidden = false;
		tell("gate-why", `${why}. The chat works with a user's key, too.`);
		// Without events, the name of the model comes from the API for users.
		try {
			const { data: [{ id }] } = await read("v1/models", "user");
			introduce({ model: id });
		} catch { /* the chat says what is wrong when it is used */ }
	},
};

function introduce(facts) {
	const { model, summary, context, policy, version } = facts;
	chat.introduce(facts);
	story.introduce(facts);
	tell("model", model);
	tell("summary", join(summary, context && `context ${num(context)}`, policy && `policy ${policy}`, version && `weft ${version}`));
	document.title = `${model} · weft`;
}

// ---- actions of the user

function pause() {
	isPaused = !isPaused;
	$("pause").ariaPressed = isPaused;
	tell("pause", isPaused ? "Follow" : "Hold view");
	if (isPaused) state("wait", "view held, the engine goes on");
}

function paint() {
	root.style.colorScheme = localStorage.getItem("weft-theme") || "";
	steps.paint();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", paint);
on("theme", "click", () => {
	const isDark = (root.style.colorScheme || (dark.matches && "dark")) === "dark";
	localStorage.setItem("weft-theme", isDark ? "light" : "dark");
	paint();
});
on("pause", "click", pause);

const write = () => {
	views.see("chat");
	$("text").focus();
};
keys.start(
	isFilm ? { p: pause } : {
		p: pause,
		"/": write,
		n: () => chat.open().then(write),
		e: () => chat.last("edit"),
		r: () => chat.last("again"),
		"Ctrl+K": list.search,
		"Alt+ArrowUp": () => list.step(-1),
		"Alt+ArrowDown": () => list.step(1),
	},
	[chat.stop, list.close, story.close],
);

// ---- start

async function play() {
	steps.onPick(film.seek);
	try {
		const facts = await film.open(show);
		introduce(facts);
		state("live", plural(facts.frames.length, "picture"));
		await film.go(0);
	} catch (error) {
		state("away", error.message);
	}
}

function watch() {
	views.start();
	chat.start();
	feed.open(handlers);
	setInterval(look, 1_000);
	models.open((name) => {
		introduce({ model: name });
		feed.again();
	});
	document.addEventListener("visibilitychange", feed.look);
	on("gate-form", "submit", (event) => {
		event.preventDefault();
		keepKey("admin", $("admin-key"));
		$("gate").hidden = true;
		state("wait", "connecting");
		feed.open(handlers);
	});
}

paint();
if (isFilm) play();
else watch();
